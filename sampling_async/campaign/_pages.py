"""How the pages about campaigns are made: the templates, and how they write numbers, times and texts.

A page is one file that loads nothing and runs nothing.
"""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from sampling_async._contract.checks import count_of
from sampling_async._version import __version__
from sampling_async.campaign import _charts as charts

if TYPE_CHECKING:
    from datetime import datetime

LONGEST_TITLE: Final = 120
LONGEST_NAME: Final = 60
_LONGEST_TEXT: Final = 600
_NOTHING: Final = "\N{EN DASH}"
_JOINERS: Final = "\u200c\u200d"  # Persian and emojis need them; the other invisible marks can garble a page


def rendered(template: str, **values: Any) -> str:
    """Return a page."""
    return f"{_PAGES.get_template(template).render(values)}\n"


def clean(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return a text without line breaks, control characters and marks of direction, cut with an ellipsis."""
    # More than is shown, as marks are left out; not all of it, as it can be very long.
    shown = " ".join("".join(map(_visible, text[: 4 * longest])).split())
    whole = len(shown) <= longest and len(text) <= 4 * longest
    return shown if whole else shown[: longest - 1].rstrip() + "…"


def _name(text: str) -> str:
    return clean(text, LONGEST_NAME) or "(no name)"


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


def percent(part: float, whole: float) -> str:
    """Return a share in words: `41.3 %`, or a dash of nothing."""
    if not whole > 0:
        return _NOTHING
    share = 100 * part / whole
    if share and abs(share) < 0.1:  # noqa: PLR2004  what one decimal shows
        return "< 0.1 %"
    if part < whole and share > 99.9:  # noqa: PLR2004  likewise: all is only said of all
        return "> 99.9 %"
    return f"{share:,.1f} %"


def duration(seconds: float) -> str:
    """Return a duration with its two largest units: `2 h 59 min`."""
    if not math.isfinite(seconds) or seconds < 0:
        return _NOTHING
    if seconds < 59.95:  # noqa: PLR2004  what would be rounded to a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def clock(when: datetime) -> str:
    return f"{charts.in_utc(when):%Y-%m-%d %H:%M:%S} UTC"


_FILTERS: Final[dict[str, Any]] = {
    "amount": "{:,.2f}".format,
    "tenths": "{:,.1f}".format,
    "clean": clean,
    "clock": clock,
    "duration": duration,
    "name": _name,
    "number": "{:,}".format,
    "utc": charts.in_utc,
    "with_noun": count_of,
}
_NAMES: Final[dict[str, Any]] = {
    "bar": charts.bar,
    "percent": percent,
    "span_bar": charts.span_bar,
    "stacked_bar": charts.stacked_bar,
    "version": __version__,
}
_PAGES: Final = Environment(
    loader=PackageLoader("sampling_async.campaign"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters.update(_FILTERS)
_PAGES.globals.update(_NAMES)
