"""Charts as SVG that fit any width: places across are shares of it, and heights and texts are in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Final, TypeAlias

from attrs import frozen

from sampling_async.campaign._markup import Html, clean, compact, count, in_utc, join, share_of, tag
from sampling_async.campaign._summary import Moment, Wait

Values: TypeAlias = Sequence[float | None]
"""What is drawn of each moment; None where there is nothing to draw."""

_HEIGHT: Final = 180
_TOP: Final = 24  # for the unit, above the axis
_BOTTOM: Final = 40  # for the time and the day, below it
_WIDE: Final = 1000  # the drawing is stretched from this to the width that there is
_FEW, _MANY = 4, 6  # ticks; texts with seconds or days are wide
_MINUTE: Final = 60
_DAY: Final = 86_400
_STEPS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800),
    *(hours * 3_600 for hours in (1, 2, 3, 6, 12)),
    *(days * _DAY for days in (1, 2, 5, 10, 20, 50, 100)),
)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_HATCHES: Final = {"outage": 45, "paused": 0, "hours": 90, "rate": -45}


@frozen
class Part:
    """A part of a bar: what it is, by which it is coloured, and how much."""

    kind: str
    amount: float


@frozen
class Curve:
    """A line of a chart: the colour, its values, and whether it is dashed."""

    colour: str
    values: Values
    dashed: bool = False


# --- Bars


def bar(parts: Iterable[Part], whole: float) -> Html:
    """Return a small bar for a table; the numbers are beside it, so that screen readers pass over it."""
    return tag("svg", *_segments(parts, whole), aria_hidden="true")


def stacked_bar(parts: Sequence[Part], label: str) -> Html:
    """Return a bar that is the whole of its parts."""
    whole = sum(part.amount for part in parts)
    content = (tag("title", label), *_segments(parts, whole))
    return tag("svg", *content, class_="account", role="img", aria_label=label)


def swatch(kind: str) -> Html:
    """Return the square that stands for a colour in a legend."""
    return tag("svg", tag("rect", width=14, height=14, class_=f"f-{kind}"), class_="swatch", aria_hidden="true")


def wait_swatch(kind: str) -> Html:
    """Return the square that stands for a kind of wait."""
    return tag(
        "svg", tag("rect", width=14, height=14, fill=_hatched(kind)), class_="swatch", aria_hidden="true"
    )


def line_swatch(curve: Curve) -> Html:
    """Return the piece of line that stands for a curve."""
    line = tag("path", d="M0 7H24", class_=_curve_class(curve))
    return tag("svg", line, class_="swatch line", viewBox="0 0 24 14", aria_hidden="true")


def _segments(parts: Iterable[Part], whole: float) -> Iterable[Html]:
    # The style sheet has their height: a page has thousands of them.
    begin = 0.0
    for part in parts:
        width = min(share_of(part.amount, whole), 1 - begin)
        if width > 0:
            x = _across(begin) if begin else None
            yield tag("rect", x=x, width=_across(width), class_=f"f-{part.kind}")
        begin += width


def histogram(bins: Sequence[int], edges: Sequence[str], *, label: str, unit: str, below: str) -> Html:
    """Return a bar for each bin, with its number above.

    Args:
        bins: The numbers.
        edges: Where each bin begins; the last one has no end.
        label: What the chart shows, for those who do not see it.
        unit: What is counted.
        below: What the edges are.
    """
    width = 1 / len(bins)
    scale = Scale(max(bins))
    bars = (_column(place * width, width, scale, number) for place, number in enumerate(bins))
    ticks = (_below(edge, place * width) for place, edge in enumerate(edges))
    names = (_below(below, 0.5 - width / 2, line=2), _below("over", 1 - width / 2, line=2))
    return _chart(label, join(*_grid(scale, unit), *bars, *ticks, *names))


def _below(text: str, share: float, line: int = 1) -> Html:
    return tag("text", text, x=_across(share), y=_TOP + _HEIGHT + 2 + 15 * line, class_="middle")


def _column(begin: float, width: float, scale: Scale, number: int) -> Html:
    height = round(_HEIGHT * scale.share(number), 1)
    top = _TOP + _HEIGHT - height
    middle = _across(begin + width / 2)
    return join(
        tag(
            "rect",
            x=_across(begin + width * 0.1),
            width=_across(width * 0.8),
            y=top,
            height=height,
            class_="f-line",
        ),
        tag("text", compact(number), x=middle, y=top - 4, class_="middle strong") if number else "",
    )


# --- Scales


class Scale:
    """An axis from zero to a round number that is at least the highest value."""

    def __init__(self, highest: float) -> None:
        if not (math.isfinite(highest) and highest > 0):
            highest = 1.0
        size = 10.0 ** math.floor(math.log10(highest / 4))
        step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * 4 >= highest * (1 - 1e-9))
        self.ticks = [step * place for place in range(math.ceil(highest / step * (1 - 1e-9)) + 1)]

    def share(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        return share_of(value, self.ticks[-1])


@frozen
class Span:
    """The time that a chart shows.

    Attributes:
        began: Its begin, in seconds since 1970.
        ended: Its end.
    """

    began: float
    ended: float

    @classmethod
    def of(cls, moments: Sequence[Moment]) -> Span:
        """Return the time from the first moment to the end of the last."""
        began = min(_stamp(moment.at) for moment in moments)
        ended = max(_stamp(moment.at) + moment.seconds for moment in moments)
        return cls(began, max(ended, began + 0.001))

    def share(self, stamp: float) -> float:
        """Return where a time is, from 0 to 1."""
        return share_of(stamp - self.began, self.ended - self.began)

    def ticks(self) -> list[tuple[float, str, str]]:
        """Return round times in it, each with its text, and with its day where that is a new one."""
        span = self.ended - self.began
        longest = math.ceil(span / _FEW / _DAY) * _DAY
        step = next((step for step in _STEPS if span / step <= _most_ticks(step)), longest)
        first = math.ceil(self.began / step)
        last = math.floor(self.ended / step)
        stamps = [float(place * step) for place in range(first, last + 1)] or [self.began]
        texts = [_time_texts(stamp, step) for stamp in stamps]
        days = ["", *(day for _, day in texts)]
        return [
            (stamp, time, "" if day == before else day)
            for stamp, (time, day), before in zip(stamps, texts, days, strict=False)
        ]


def _most_ticks(step: float) -> int:
    return _MANY if _MINUTE <= step < _DAY else _FEW


def _stamp(when: datetime) -> float:
    return in_utc(when).timestamp()


def _time_texts(stamp: float, step: float) -> tuple[str, str]:
    when = datetime.fromtimestamp(stamp, UTC)
    day = f"{when.day} {_MONTHS[when.month - 1]}"
    if step >= _DAY:
        return day, str(when.year)
    return f"{when:%H:%M}" if step >= _MINUTE else f"{when:%H:%M:%S}", day


# --- Charts over time


@frozen(kw_only=True)
class TimeChart:
    """A chart of moments, with the waits as bands behind them.

    Attributes:
        moments: The moments.
        waits: The waits.
        unit: What the axis counts.
        label: What the chart shows, for those who do not see it.
    """

    moments: Sequence[Moment]
    waits: Sequence[Wait]
    unit: str
    label: str

    def areas(self, layers: Sequence[tuple[str, Values]]) -> Html:
        """Return values upon each other: from the bottom, each with its kind."""
        tops: list[list[float]] = [[0.0] * len(self.moments)]
        for _, values in layers:
            tops.append([low + _drawable(value) for low, value in zip(tops[-1], values, strict=True)])
        scale = Scale(max(tops[-1], default=0))
        paths = (
            tag("path", d=self._blocks(scale, low, high), class_=f"f-{kind}")
            for (kind, _), low, high in zip(layers, tops, tops[1:], strict=False)
        )
        return self._drawn(scale, paths, "areas")

    def curves(self, curves: Sequence[Curve]) -> Html:
        """Return lines with steps; where a value is missing there is a gap."""
        scale = Scale(max((_drawable(value) for curve in curves for value in curve.values), default=0))
        paths = (
            tag("path", d=self._steps(scale, curve.values), class_=_curve_class(curve)) for curve in curves
        )
        return self._drawn(scale, paths, "curves")

    def _blocks(self, scale: Scale, low: Sequence[float], high: Sequence[float]) -> str:
        return "".join(
            f"M{begin:g} {_up(scale, bottom)}V{_up(scale, top)}H{end:g}V{_up(scale, bottom)}Z"
            for (begin, end), bottom, top in zip(self._edges(), low, high, strict=True)
            if top > bottom
        )

    def _steps(self, scale: Scale, values: Values) -> str:
        pieces: list[str] = []
        reached = -math.inf
        for (begin, end), value in zip(self._edges(), values, strict=True):
            if value is None or not math.isfinite(value):
                continue
            height = _up(scale, value)
            begins = f"V{height}" if begin - reached < 1 else f"M{begin:g} {height}"
            pieces.append(f"{begins}H{end:g}")
            reached = end
        return "".join(pieces)

    def _edges(self) -> list[tuple[float, float]]:
        span = Span.of(self.moments)
        begins = [_stamp(moment.at) for moment in self.moments]
        ends = [begin + moment.seconds for begin, moment in zip(begins, self.moments, strict=True)]
        return [
            (round(_WIDE * span.share(begin), 2), round(_WIDE * span.share(end), 2))
            for begin, end in zip(begins, ends, strict=True)
        ]

    def _drawn(self, scale: Scale, paths: Iterable[Html], kind: str) -> Html:
        span = Span.of(self.moments)
        drawing = tag(
            "svg",
            *paths,
            class_=kind,
            viewBox=f"0 0 {_WIDE} {_HEIGHT}",
            preserveAspectRatio="none",
            y=_TOP,
            width="100%",
            height=_HEIGHT,
        )
        content = (*_grid(scale, self.unit), *_bands(span, self.waits), drawing, *_time_axis(span))
        return _chart(self.label, join(*content))


def hatches() -> Html:
    """Return the patterns of the bands; a page has them once."""
    patterns = (_hatch(kind, angle) for kind, angle in _HATCHES.items())
    return tag("svg", tag("defs", *patterns), width=0, height=0, style="position: absolute", aria_hidden="true")


def _hatch(kind: str, angle: int) -> Html:
    return tag(
        "pattern",
        tag("rect", width=6, height=6, class_=f"f-{kind}", fill_opacity=0.16),
        tag("rect", width=1.5, height=6, class_=f"f-{kind}", fill_opacity=0.6),
        id=f"wait-{kind}",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform=f"rotate({angle})",
    )


def _hatched(kind: str) -> str:
    return f"url(#wait-{kind})"


def _bands(span: Span, waits: Sequence[Wait]) -> Iterable[Html]:
    by_kind = sorted(waits, key=lambda wait: (wait.kind, _stamp(wait.began)))
    for kind, group in groupby(by_kind, key=lambda wait: wait.kind):
        times = [(span.share(_stamp(wait.began)), span.share(_stamp(wait.ended))) for wait in group]
        for begin, end in _merged(times):
            yield tag(
                "rect",
                x=_across(begin),
                y=_TOP,
                width=_across(max(end - begin, 0.004)),  # a short one is seen too
                height=_HEIGHT,
                fill=_hatched(kind),
            )


def _merged(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join what no eye could keep apart: there can be a wait each minute."""
    merged: list[tuple[float, float]] = []
    for begin, end in times:
        if merged and begin - merged[-1][1] < 0.002:  # noqa: PLR2004  two pixels of a wide chart
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > 0 and begin < 1:
            merged.append((begin, end))
    return merged


def _chart(label: str, content: Html) -> Html:
    height = _TOP + _HEIGHT + _BOTTOM
    shown = join(tag("title", label), content)
    return tag(
        "div", tag("svg", shown, class_="chart", height=height, role="img", aria_label=label), class_="plot"
    )


def _grid(scale: Scale, unit: str) -> Iterable[Html]:
    yield tag("text", clean(unit, 40), x=-40, y=11)
    for value in scale.ticks:
        y = round(_TOP + _HEIGHT * (1 - scale.share(value)), 1)
        yield tag("line", x1=0, x2="100%", y1=y, y2=y, class_=None if value else "axis")
        yield tag("text", compact(value), x=-6, y=y + 4, class_="end")


def _time_axis(span: Span) -> Iterable[Html]:
    bottom = _TOP + _HEIGHT
    for stamp, time, day in span.ticks():
        share = span.share(stamp)
        x = _across(share)
        yield tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis")
        yield tag("text", time, x=x, y=bottom + 17, class_="middle")
        if day:
            yield _below(day, share, line=2)


def _curve_class(curve: Curve) -> str:
    return f"curve s-{curve.colour}" + (" dashed" if curve.dashed else "")


def _drawable(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _up(scale: Scale, value: float) -> str:
    return f"{_HEIGHT * (1 - scale.share(value)):.4g}"


def _across(share: float) -> str:
    return f"{100 * share:.4g}%"


def most(values: Values) -> str:
    """Return the highest of values in words."""
    highest = max((_drawable(value) for value in values), default=0.0)
    return count(round(highest)) if highest >= 100 else compact(highest)  # noqa: PLR2004  three digits


def has_values(*curves: Curve) -> bool:
    """Tell whether there is anything to draw."""
    return any(value is not None for curve in curves for value in curve.values)
