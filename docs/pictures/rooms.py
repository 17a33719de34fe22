"""Draw the packages of the code: `python docs/pictures/rooms.py` writes rooms.svg."""

from __future__ import annotations

from drawing import HERE, Drawing

WIDTH, HEIGHT, MIDDLE = 480, 640, 240
WIDE, HALF, TALL = 448, 215, 58
LEFT, RIGHT = 16, 249
TOOLS = ("campaign", "matching", "notifications", "simulator", "_cli")
PACKAGES = (
    # package, what it does, x, y, width
    ("_client  _profiles  _log  _snapshot", "the promise to the user", LEFT, 128, WIDE),
    ("_bulk", "chunks in, outcomes out", LEFT, 212, HALF),
    ("_watch  _telemetry", "the inventory; spans, metrics", RIGHT, 212, HALF),
    ("_journal", "sent and answered, on disk", LEFT, 296, HALF),
    ("_calls", "one call: attempts, retries", RIGHT, 296, HALF),
    ("_protocol", "five requests, outcomes", LEFT, 380, HALF),
    ("_wire", "one attempt, on sockets", RIGHT, 380, HALF),
    ("_json", "bytes to records", LEFT, 464, HALF),
    ("_pacing", "who may run now", RIGHT, 464, HALF),
    ("_contract", "the words: errors, records, settings", LEFT, 548, WIDE),
)


def picture() -> str:
    """Return the picture."""
    draw = Drawing(
        WIDTH, HEIGHT, "The packages of the code. Imports go downwards only; the tools are never imported."
    )
    draw.box(LEFT, 20, WIDE, 72, fill="ground", edge="soft", dashed=True)
    draw.text(MIDDLE, 42, "tools around it: the client never imports them", size=14, colour="soft")
    # Names have different lengths, so each gets a place as wide as it is.
    letters, at = sum(map(len, TOOLS)) + 2 * len(TOOLS), 0
    for tool in TOOLS:
        draw.text(LEFT + WIDE * (at + 1 + len(tool) / 2) / letters, 74, tool, size=14, mono=True, bold=True)
        at += len(tool) + 2
    draw.arrow(MIDDLE, 94, MIDDLE, 125)
    for package, does, x, y, width in PACKAGES:
        draw.box(x, y, width, TALL, fill="box", edge="strong")
        draw.text(x + width / 2, y + 25, package, size=16, mono=True, bold=True, colour="strong")
        draw.text(x + width / 2, y + 46, does, size=14)
    for x in (LEFT + HALF / 2, RIGHT + HALF / 2):
        for y in (128, 212, 296, 380, 464):
            # A watch makes no calls itself, the client hands them in; it needs _json and _pacing only. But
            # telemetry knows the reports of _calls.
            draw.arrow(x, y + TALL + 2, x, y + 81)
    draw.arrow(LEFT + HALF - 20, 212 + TALL + 2, RIGHT + 20, 212 + 81)
    draw.arrow(RIGHT + 20, 296 + TALL + 2, LEFT + HALF - 20, 296 + 81)  # a call asks one of the five requests
    draw.text(MIDDLE, 628, "an arrow means: imports", size=13, colour="soft")
    return draw.svg()


if __name__ == "__main__":
    (HERE / "rooms.svg").write_text(picture())
