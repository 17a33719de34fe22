"""Draw the fan-out: `python docs/pictures/fan_out.py` writes fan-out.svg."""

from __future__ import annotations

from drawing import HERE, Drawing

WIDTH, HEIGHT, MIDDLE = 480, 600, 240
MEMBERS = (("m000001", 250, (100, 100, 50)), ("m000002", 100, (100,)), ("m000003", 40, (40,)))
LOST, REFUSED = 1, 4  # the chunks whose response is lost, and whose connection is refused
TITLE = (
    "390 quota IDs of three members are cut into five requests of at most 100 IDs. At most eight requests run "
    "at once. Each ID gets one outcome: 48 invited, 202 rejected, 40 not sent, 100 unknown."
)
OUTCOMES = (
    ("invited", 48, "good", ("an invite", "came")),
    ("rejected", 202, "plain", ("the service", "said no")),
    ("not_sent", 40, "held", ("safe to", "send again")),
    ("unknown", 100, "bad", ("an invite", "may exist")),
)
GAP, PER_ID, EDGE = 8, 1.1, 16
WORDY = 60  # IDs that make a box wide enough for the member's code


def picture() -> str:
    """Return the picture."""
    draw = Drawing(WIDTH, HEIGHT, TITLE)
    draw.text(MIDDLE, 30, "390 quota IDs, asked for three members,", size=16, bold=True)
    draw.text(MIDDLE, 51, "are cut into requests of at most 100", size=15)
    tips = _cut(draw)
    draw.box(EDGE, 202, WIDTH - 2 * EDGE, 66, fill="box", edge="strong")
    draw.text(MIDDLE, 227, "one limit for all: at most 8 requests at once", size=15, bold=True)
    for permit in range(8):
        fill = "strong" if permit < len(tips) else "ground"
        draw.dot(MIDDLE - 84 + permit * 24, 249, 7, fill=fill, edge="strong")
    for number, x in enumerate(tips):
        draw.arrow(x, 171, x, 199)
        if number != REFUSED:
            draw.arrow(x, 271, x, 310)
    refused = tips[REFUSED]
    for line, word in enumerate(("no con-", "nection")):
        draw.text(refused, 288 + 16 * line, word, size=13, colour="held")
    draw.box(EDGE, 314, 374, 44, fill="strong")
    draw.text(EDGE + 187, 341, "the service", size=16, colour="on", bold=True)
    for number, x in enumerate(tips[:REFUSED]):
        if number != LOST:
            draw.arrow(x, 362, x, 416)
    draw.text(tips[LOST], 380, "response lost", size=13, colour="bad")
    draw.arrow(tips[LOST], 387, tips[LOST], 416, colour="bad")
    draw.arrow(refused, 312, refused, 416, colour="held")
    draw.text(MIDDLE, 444, "exactly one outcome for each ID", size=16, bold=True)
    width = (WIDTH - 2 * EDGE - 3 * GAP) / 4
    for place, (status, count, colour, meaning) in enumerate(OUTCOMES):
        x = EDGE + place * (width + GAP)
        draw.box(x, 460, width, 98, fill="box", edge=colour)
        draw.text(x + width / 2, 482, status, size=15, mono=True, bold=True, colour=colour)
        draw.text(x + width / 2, 508, str(count), size=19, bold=True)
        for line, word in enumerate(meaning):
            draw.text(x + width / 2, 529 + 17 * line, word, size=13.5, colour="soft")
    total = " + ".join(str(count) for _, count, _, _ in OUTCOMES)
    draw.text(MIDDLE, 584, f"{total} = {sum(count for _, count, _, _ in OUTCOMES)}", size=15, mono=True)
    return draw.svg()


def _cut(draw: Drawing) -> list[float]:
    """Draw members and their chunks; return where the chunks are."""
    left = (WIDTH - sum(ids for _, ids, _ in MEMBERS) * PER_ID - 2 * GAP) / 2
    tips: list[float] = []
    for code, ids, chunks in MEMBERS:
        width = ids * PER_ID
        draw.box(left, 66, width, 34, fill="box", edge="edge")
        draw.text(left + width / 2, 88, f"{code}: {ids}" if ids > WORDY else str(ids), size=13.5, mono=True)
        at = left
        for chunk in chunks:
            inner = chunk * PER_ID - 6
            colour = {LOST: "bad", REFUSED: "held"}.get(len(tips), "strong")
            tips.append(at + 3 + inner / 2)
            draw.arrow(tips[-1], 103, tips[-1], 130)
            draw.box(at + 3, 134, inner, 34, fill="ground", edge=colour)
            draw.text(tips[-1], 156, str(chunk), size=14, mono=True, colour=colour)
            at += chunk * PER_ID
        left += width + GAP
    return tips


if __name__ == "__main__":
    (HERE / "fan-out.svg").write_text(picture())
