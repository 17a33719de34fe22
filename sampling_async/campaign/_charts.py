"""Charts as SVG that fit any width: places across are shares of it, and heights and texts are in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate, groupby
from typing import Final, TypeAlias

from attrs import frozen
from markupsafe import Markup, escape

from sampling_async.campaign._summary import Moment, Wait

Values: TypeAlias = Sequence[float | None]  # what is drawn of each moment; None where there is nothing to draw
_HEIGHT: Final = 180
_TOP: Final = 24  # for the unit, above the axis
_BOTTOM: Final = 40  # for the time and the day, below it
_WIDE: Final = 1000  # the drawing is stretched from this to the width that there is
_FEW, _MANY = 4, 6  # ticks; texts with seconds or days are wide
_MINUTE: Final = 60
_DAY: Final = 86_400
_MOST_NAMES: Final = 6  # below bars, so that a phone can show them
_SMALLEST, _LARGEST = 3.0, 16.0  # radius of a dot
_STEPS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800),
    *(hours * 3_600 for hours in (1, 2, 3, 6, 12)),
    *(days * _DAY for days in (1, 2, 5, 10, 20, 50, 100)),
)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_UNITS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def _tag(name: str, *content: str, **attributes: object) -> Markup:
    """Return an element; `class_` is `class`, `aria_label` is `aria-label`; None leaves one out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(map(escape, content))
    closed = f">{inner}</{name}>" if inner else "/>"
    return Markup(f"<{name}{given}{closed}")  # noqa: S704  the names are of this module, the rest was escaped


# --- Bars


def bar(whole: float, parts: Mapping[str, float]) -> Markup:
    """Return a small bar for a table, with its parts by kind, from the left; `whole` is the full width."""
    # The numbers are beside it, so that screen readers may pass over it.
    return _tag("svg", *_segments(whole, parts), aria_hidden="true")


def span_bar(low: float, high: float) -> Markup:
    """Return a small bar for a table that shows from where to where a share lies."""
    width = max(_share_of(high - low, 1), 0.01)
    rect = _tag("rect", x=_across(_share_of(low, 1)), width=_across(width), class_="f-line")
    return _tag("svg", rect, aria_hidden="true")


def stacked_bar(parts: Mapping[str, float], label: str) -> Markup:
    segments = _segments(sum(parts.values()), parts)
    return _tag("svg", _tag("title", label), *segments, class_="account", role="img", aria_label=label)


def _segments(whole: float, parts: Mapping[str, float]) -> Iterator[Markup]:
    # The style sheet has their height: a page has thousands of them.
    begin = 0.0
    for kind, amount in parts.items():
        width = min(_share_of(amount, whole), 1 - begin)
        if width > 0:
            yield _tag("rect", x=_across(begin) if begin else None, width=_across(width), class_=f"f-{kind}")
        begin += width


def histogram(bins: Sequence[int], edges: Sequence[str], *, label: str, unit: str, below: str) -> Markup:
    """Return a bar for each bin, with its number above."""
    width = 1 / len(bins)
    scale = Scale(max(bins))
    bars = (
        piece for place, number in enumerate(bins) for piece in _column(place * width, width, scale, number)
    )
    ticks = (_below(edge, place * width) for place, edge in enumerate(edges))
    names = (_below(below, 0.5 - width / 2, line=2), _below("over", 1 - width / 2, line=2))
    return _chart(label, *_grid(scale, unit), *bars, *ticks, *names)


def _below(text: str, share: float, line: int = 1) -> Markup:
    return _tag("text", text, x=_across(share), y=_TOP + _HEIGHT + 2 + 15 * line, class_="middle")


def _column(begin: float, width: float, scale: Scale, number: float) -> Iterator[Markup]:
    height = round(_HEIGHT * scale.share(number), 1)
    top = _TOP + _HEIGHT - height
    x, wide = _across(begin + width * 0.1), _across(width * 0.8)
    yield _tag("rect", x=x, width=wide, y=top, height=height, class_="f-line")
    if number:
        yield _tag("text", compact(number), x=_across(begin + width / 2), y=top - 4, class_="middle strong")


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
        return _share_of(value, self.ticks[-1])


@frozen
class Span:
    """The time that a chart shows, in seconds since 1970."""

    began: float
    ended: float

    @classmethod
    def of(cls, moments: Sequence[Moment]) -> Span:
        began = min(_stamp(moment.at) for moment in moments)
        ended = max(_stamp(moment.at) + moment.seconds for moment in moments)
        return cls(began, max(ended, began + 0.001))

    @classmethod
    def of_places(cls, began: datetime, seconds: float, places: int) -> Span:
        return cls(_stamp(began), _stamp(began) + seconds * places)

    def share(self, stamp: float) -> float:
        return _share_of(stamp - self.began, self.ended - self.began)

    def ticks(self) -> list[tuple[float, str, str]]:
        """Return round times in it, each with its text, and with its day where that is a new one."""
        span = self.ended - self.began
        longest = math.ceil(span / _FEW / _DAY) * _DAY
        most = {step: _MANY if _MINUTE <= step < _DAY else _FEW for step in _STEPS}
        step = next((step for step in _STEPS if span / step <= most[step]), longest)
        first = math.ceil(self.began / step)
        last = math.floor(self.ended / step)
        stamps = [float(place * step) for place in range(first, last + 1)] or [self.began]
        texts = [_time_texts(stamp, step) for stamp in stamps]
        days = ["", *(day for _, day in texts)]
        return [
            (stamp, time, "" if day == before else day)
            for stamp, (time, day), before in zip(stamps, texts, days, strict=False)
        ]


def _stamp(when: datetime) -> float:
    return in_utc(when).timestamp()


def _time_texts(stamp: float, step: float) -> tuple[str, str]:
    when = datetime.fromtimestamp(stamp, UTC)
    day = f"{when.day} {_MONTHS[when.month - 1]}"
    if step >= _DAY:
        return day, str(when.year)
    return f"{when:%H:%M}" if step >= _MINUTE else f"{when:%H:%M:%S}", day


@frozen
class Dot:
    """A dot of a scatter plot: its place, its size from 0 to 1, its colour, and what it stands for."""

    x: float
    y: float
    size: float
    kind: str
    text: str


def scatter(dots: Sequence[Dot], *, across: str, unit: str, label: str) -> Markup:
    """Return dots between two axes that begin at zero; `across` and `unit` say what they show."""
    wide, high = (Scale(max((getattr(dot, axis) for dot in dots), default=0.0)) for axis in ("x", "y"))
    drawn = (
        _tag(
            "circle",
            _tag("title", dot.text),
            cx=_across(wide.share(dot.x)),
            cy=_TOP + float(_up(high, dot.y)),
            r=round(_SMALLEST + (_LARGEST - _SMALLEST) * math.sqrt(_share_of(dot.size, 1)), 1),
            class_=f"dot f-{dot.kind}",
        )
        # The large ones first, so that they hide no small one.
        for dot in sorted(dots, key=lambda dot: -dot.size)
    )
    ticks = (_below(compact(tick), wide.share(tick)) for tick in wide.ticks)
    return _chart(label, *_grid(high, unit), *drawn, *ticks, _below(across, 0.5, line=2))


def columns(values: Sequence[int], began: datetime, seconds: float, *, label: str, unit: str) -> Markup:
    """Return a bar for each of some times, one after the other, with round times below."""
    span, scale, width = Span.of_places(began, seconds, len(values)), Scale(max(values)), 1 / len(values)
    bars = (
        _tag(
            "rect",
            x=_across(place * width),
            width=_across(0.9 * width),
            y=_TOP + float(_up(scale, value)),
            height=round(_HEIGHT * scale.share(value), 1),
            class_="f-invited",
        )
        for place, value in enumerate(values)
    )
    return _chart(label, *_grid(scale, unit), *bars, *_time_axis(span))


def trend(
    names: Sequence[str], values: Values, spans: Sequence[Sequence[float]] = (), *, label: str, unit: str
) -> Markup:
    """Return a bar for each name with its number above, and beside it a line for its span."""
    width, every = 1 / len(names), -(-len(names) // _MOST_NAMES)
    scale = Scale(max(map(highest, [values, *spans])))
    drawn = [*_grid(scale, unit)]
    for place, value in enumerate(values):
        drawn += _column(place * width, width, scale, _drawable(value))
    for place, ends in enumerate(spans):
        x, (low, high) = _across((place + 0.8) * width), (_TOP + float(_up(scale, end)) for end in ends)
        drawn.append(_tag("line", x1=x, x2=x, y1=low, y2=high, class_="span"))
    for at, place in enumerate(range(0, len(names), every)):  # on two lines in turn, or a phone has no room
        drawn.append(_below(names[place], (place + 0.5) * width, line=1 + at % 2))
    return _chart(label, *drawn)


# --- Charts over time


@frozen
class TimeChart:
    """Draws values of moments, with the waits as bands; `label` is for those who do not see the chart."""

    moments: Sequence[Moment]
    waits: Sequence[Wait]

    def areas(self, layers: Mapping[str, Values], *, unit: str, label: str) -> Markup:
        """Return values upon each other, from the bottom, by kind: a kind has its colour."""
        tops = list(accumulate(layers.values(), _stacked, initial=[0.0] * len(self.moments)))
        scale = Scale(max(tops[-1]))
        paths = (
            _tag("path", d=self._blocks(scale, low, high), class_=f"f-{kind}")
            for kind, low, high in zip(layers, tops, tops[1:], strict=False)
        )
        return self._drawn(scale, paths, "areas", unit, label)

    def curves(self, curves: Mapping[str, Values], *, unit: str, label: str) -> Markup:
        """Return lines with steps, and with gaps, by style: a colour, and `dashed`; empty without any value."""
        if all(value is None for values in curves.values() for value in values):
            return Markup()
        scale = Scale(max(map(highest, curves.values())))
        paths = (
            _tag("path", d=self._steps(scale, values), class_=f"curve s-{style}")
            for style, values in curves.items()
        )
        return self._drawn(scale, paths, "curves", unit, label)

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
        times = [(_stamp(moment.at), _stamp(moment.at) + moment.seconds) for moment in self.moments]
        return [
            (round(_WIDE * span.share(begin), 2), round(_WIDE * span.share(end), 2)) for begin, end in times
        ]

    def _drawn(self, scale: Scale, paths: Iterable[Markup], kind: str, unit: str, label: str) -> Markup:
        span = Span.of(self.moments)
        drawing = _tag(
            "svg",
            *paths,
            class_=kind,
            viewBox=f"0 0 {_WIDE} {_HEIGHT}",
            preserveAspectRatio="none",
            y=_TOP,
            width="100%",
            height=_HEIGHT,
        )
        return _chart(label, *_grid(scale, unit), *_bands(span, self.waits), drawing, *_time_axis(span))


def _stacked(low: Sequence[float], values: Values) -> list[float]:
    return [below + _drawable(value) for below, value in zip(low, values, strict=True)]


def _bands(span: Span, waits: Sequence[Wait]) -> Iterator[Markup]:
    by_kind = sorted(waits, key=lambda wait: (wait.kind, _stamp(wait.began)))
    for kind, group in groupby(by_kind, key=lambda wait: wait.kind):
        times = [(span.share(_stamp(wait.began)), span.share(_stamp(wait.ended))) for wait in group]
        for begin, end in _merged(times):
            width = _across(max(end - begin, 0.004))  # a short one is seen too
            yield _tag("rect", x=_across(begin), y=_TOP, width=width, height=_HEIGHT, fill=f"url(#wait-{kind})")


def _merged(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join what no eye could keep apart: there can be a wait each minute."""
    merged: list[tuple[float, float]] = []
    for begin, end in times:
        if merged and begin - merged[-1][1] < 0.002:  # noqa: PLR2004  two pixels of a wide chart
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > 0 and begin < 1:
            merged.append((begin, end))
    return merged


def _chart(label: str, *content: Markup) -> Markup:
    height = _TOP + _HEIGHT + _BOTTOM
    drawn = _tag(
        "svg", _tag("title", label), *content, class_="chart", height=height, role="img", aria_label=label
    )
    return _tag("div", drawn, class_="plot")


def _grid(scale: Scale, unit: str) -> Iterator[Markup]:
    yield _tag("text", unit, x=-40, y=11)
    for value in scale.ticks:
        y = round(_TOP + _HEIGHT * (1 - scale.share(value)), 1)
        yield _tag("line", x1=0, x2="100%", y1=y, y2=y, class_=None if value else "axis")
        yield _tag("text", compact(value), x=-6, y=y + 4, class_="end")


def _time_axis(span: Span) -> Iterator[Markup]:
    bottom = _TOP + _HEIGHT
    for stamp, time, day in span.ticks():
        share = span.share(stamp)
        x = _across(share)
        yield _tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis")
        yield _tag("text", time, x=x, y=bottom + 17, class_="middle")
        if day:
            yield _below(day, share, line=2)


# --- Numbers


def highest(values: Values) -> float:
    """Return the highest value that can be drawn; 0 if there is none."""
    return max(map(_drawable, values), default=0.0)


def compact(value: float) -> str:
    """Return a number that fits beside an axis: `250`, `1.5k`, `20M`."""
    value = float(f"{value:.3g}")
    if value >= 1000 * _UNITS[0][0]:
        return f"{value:g}"
    size, unit = next((entry for entry in _UNITS if value >= entry[0]), (1, ""))
    return f"{value / size:g}{unit}"


def in_utc(when: datetime) -> datetime:
    """Return a time in UTC; one without a zone is in UTC already."""
    return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)


def _share_of(part: float, whole: float) -> float:
    """Return a share that can be drawn: from 0 to 1, and 0 of nothing."""
    share = part / whole if whole > 0 else 0.0
    return min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0


def _drawable(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _up(scale: Scale, value: float) -> str:
    return f"{_HEIGHT * (1 - scale.share(value)):.4g}"


def _across(share: float) -> str:
    return f"{100 * share:.4g}%"
