"""Pieces of HTML and SVG, and the texts in them: everything is escaped that is not `Html` already."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime
from html import escape
from typing import Final

LONGEST_NAME: Final = 60
LONGEST_TEXT: Final = 600
NOTHING: Final = "\N{EN DASH}"

_CLOSED_AT_ONCE: Final = frozenset({"rect", "line", "path"})
_JOINERS: Final = "\u200c\u200d"  # Persian and emojis need them; the other invisible marks can garble a page
_UNITS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


class Html(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: object) -> Html:
    """Return an element; its texts and attributes are escaped.

    Args:
        name: The element's name.
        content: What is in it: texts, or `Html`.
        attributes: Their values; None leaves one out. `class_` is `class`, and `aria_label` is `aria-label`.
    """
    pairs = (
        (key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None
    )
    opening = name + "".join(f' {key}="{escape(str(value))}"' for key, value in pairs)
    if name in _CLOSED_AT_ONCE:
        return Html(f"<{opening}/>")
    return Html(f"<{opening}>{join(*content)}</{name}>")


def join(*content: str) -> Html:
    """Return pieces as one."""
    return Html("".join(piece if isinstance(piece, Html) else escape(piece) for piece in content))


def name(text: str) -> Html:
    """Return a name from data: short, and in its own direction of writing."""
    return tag("bdi", clean(text, LONGEST_NAME) or "(no name)")


def prose(text: str) -> str:
    """Return a sentence from data on one line."""
    return clean(text, LONGEST_TEXT)


def clean(text: str, longest: int) -> str:
    """Return a text without line breaks, control characters and marks of direction, cut with an ellipsis."""
    # More than is shown, as marks are left out; not all of it, as it can be very long.
    shown = " ".join("".join(_visible(character) for character in text[: 4 * longest]).split())
    whole = len(shown) <= longest and len(text) <= 4 * longest
    return shown if whole else shown[: longest - 1].rstrip() + "…"


def _visible(character: str) -> str:
    match unicodedata.category(character):
        case "Cc" | "Zl" | "Zp":
            return " "
        case "Cs":
            return "\N{REPLACEMENT CHARACTER}"  # UTF-8 has no surrogates
        case "Cf":
            return character if character in _JOINERS else ""
        case _:
            return character


def count(number: int) -> str:
    """Return a number with its thousands apart."""
    return f"{number:,}"


def money(value: float) -> str:
    """Return an amount."""
    return f"{value:,.2f}"


def share_of(part: float, whole: float) -> float:
    """Return a share that can be drawn: from 0 to 1, and 0 of nothing."""
    share = part / whole if whole > 0 else 0.0
    return min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0


def percent(part: float, whole: float) -> str:
    """Return a share in words: `41.3 %`, or a dash of nothing."""
    if not whole > 0:
        return NOTHING
    share = 100 * part / whole
    if share and abs(share) < 0.1:  # noqa: PLR2004  what one decimal shows
        return "< 0.1 %"
    if part < whole and share > 99.9:  # noqa: PLR2004  likewise: all is only said of all
        return "> 99.9 %"
    return f"{share:,.1f} %"


def compact(value: float) -> str:
    """Return a number that fits beside an axis: `250`, `1.5k`, `20M`."""
    value = float(f"{value:.3g}")
    if value >= 1000 * _UNITS[0][0]:
        return f"{value:g}"
    size, unit = next((entry for entry in _UNITS if value >= entry[0]), (1, ""))
    return f"{value / size:g}{unit}"


def duration(seconds: float) -> str:
    """Return a duration with its two largest units: `2 h 59 min`."""
    if not math.isfinite(seconds) or seconds < 0:
        return NOTHING
    if seconds < 59.95:  # noqa: PLR2004  what would be rounded to a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def in_utc(when: datetime) -> datetime:
    """Return a time in UTC; one without a zone is in UTC already."""
    return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)


def clock(when: datetime) -> str:
    """Return a time in UTC to the second."""
    return f"{in_utc(when):%Y-%m-%d %H:%M:%S} UTC"


def timed(when: datetime | None, otherwise: str) -> Html:
    """Return a time in UTC as an element, or what to say if there is none."""
    if when is None:
        return join(otherwise)
    return tag("time", clock(when), datetime=in_utc(when).isoformat(timespec="seconds"))
