"""The plots of the page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from speed.contenders import AIOHTTP, GENERATED, HTTPX, OURS
from speed.queued import REFERENCE
from speed.stalls import GET, ITER, LONGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from speed.sections import Section

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#555555"
"""Colours that colour-blind readers can distinguish."""

COLOURS: Final = {OURS: BLUE, AIOHTTP: ORANGE, HTTPX: GREEN, GENERATED: PURPLE, GET: BLUE, ITER: "#56B4E9"}
MARKS: Final = {OURS: "o", AIOHTTP: "s", HTTPX: "^", GENERATED: "D"}


@dataclass(frozen=True)
class Plot:
    """A plot, and its description."""

    title: str
    file: str
    caption: str


def draw(sections: list[Section], folder: Path, stem: str) -> list[Plot]:
    """Draw the plots of the sections that were run."""
    drawn = []
    for section in sections:
        if section.name in _PLOTS and section.measured.samples:
            title, caption, drawing = _PLOTS[section.name]
            figure = drawing(section.measured.samples)
            file = f"{stem}-{section.name}.png"
            figure.savefig(folder / file, dpi=120)
            plt.close(figure)
            drawn.append(Plot(title, file, caption))
    return drawn


def _width(samples: Mapping[str, Any]) -> Figure:
    figure, (costs, speeds) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, by_width in samples["pairs"].items():
        if not by_width:
            continue
        cpu = [statistics.median(pair.cpu for pair in pairs) for pairs in by_width.values()]
        ids = [statistics.median(pair.ids for pair in pairs) for pairs in by_width.values()]
        style = {"color": COLOURS[name], "marker": MARKS[name], "label": name, "linewidth": 2}
        costs.plot(list(by_width), cpu, **style)
        speeds.plot(list(by_width), ids, **style)
    for axes, what in ((costs, "CPU a request of 100 IDs (us)"), (speeds, "quota IDs a second")):
        _logarithmic(axes, list(samples["percentiles_ms"]))
        axes.set_xlabel("requests at once")
        axes.set_ylabel(what)
    figure.legend(*costs.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _latency(samples: Mapping[str, Any]) -> Figure:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    found = samples["percentiles_ms"]
    sizes = list(found)
    service = list(samples["service_ms"].values())
    axes.plot(sizes, service, color=GREY, linestyle="--", linewidth=1.5)
    axes.annotate(
        "the service alone", (sizes[-1], service[-1]), (6, -3), textcoords="offset points", color=GREY
    )
    for percent, colour, mark in (("p50", BLUE, "o"), ("p90", GREEN, "s"), ("p99", ORANGE, "^")):
        times = [found[size][percent] for size in sizes]
        axes.plot(sizes, times, color=colour, marker=mark, linewidth=2)
        axes.annotate(percent, (sizes[-1], times[-1]), (6, -3), textcoords="offset points", color=colour)
    axes.set_xlim(0, 122)
    axes.set_ylim(0)
    axes.set_xticks(sizes)
    axes.set_xlabel("quota IDs a request")
    axes.set_ylabel("a request takes (ms)")
    _plain(axes)
    return figure


def _stalls(samples: Mapping[str, Any]) -> Figure:
    readings, edges = samples["readings"], samples["edges_ms"]
    figure, panels = plt.subplots(
        len(readings), 1, figsize=(7.5, 6.6), sharex=True, sharey=True, layout="constrained"
    )
    labels = ["0", *[f"{edge:,}" for edge in edges]]
    for axes, (what, taken) in zip(panels, readings.items(), strict=True):
        counts = [sum(column) / len(taken) for column in zip(*(reading.bins for reading in taken), strict=True)]
        axes.bar(range(len(counts)), counts, width=0.9, align="edge", color=COLOURS[what])
        axes.set_yscale("log")
        axes.set_ylim(0.1, 5000)
        axes.axvline(edges.index(int(LONGEST)) + 1, color=GREY, linestyle="--", linewidth=1.5)
        longest = max(reading.stalls[0] for reading in taken)
        axes.text(
            0.99, 0.93, f"{what}: longest {longest:,.0f} ms", transform=axes.transAxes, ha="right", va="top"
        )
        _plain(axes)
    panels[0].annotate(
        "goal", (edges.index(int(LONGEST)) + 1, 1000), (4, 0), textcoords="offset points", color=GREY
    )
    panels[-1].set_xticks(range(len(labels)), labels)
    panels[-1].set_xlabel("the loop stood still for (ms)")
    figure.supylabel("times a read", fontsize=10)
    return figure


def _queued(samples: Mapping[str, Any]) -> Figure:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    costs = {100 * chunks: [each.relative for each in slices] for chunks, slices in samples["slices"].items()}
    medians = [statistics.median(each) for each in costs.values()]
    middle = (max(medians) * min(medians)) ** 0.5
    axes.axhspan(middle / 1.2**0.5, middle * 1.2**0.5, color=GREY, alpha=0.15, linewidth=0)
    for ids, each in costs.items():
        axes.plot([ids] * len(each), each, "o", color=BLUE, alpha=0.2, markersize=4)
    axes.plot(list(costs), medians, color=BLUE, marker="o", linewidth=2)
    axes.set_xscale("log")
    axes.set_xticks(list(costs), [f"{ids:,}" for ids in costs])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 2.5)
    axes.text(0.03, 0.05, "the band: 20 % from top to bottom", transform=axes.transAxes, color=GREY)
    axes.set_xlabel("quota IDs in the stream")
    axes.set_ylabel(f"CPU a request, by that of a stream of {REFERENCE} chunks")
    _plain(axes)
    return figure


def _logarithmic(axes: Axes, widths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", alpha=0.3)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


_PLOTS: Final[dict[str, tuple[str, str, Callable[[Mapping[str, Any]], Figure]]]] = {
    "width": (
        "CPU a request and quota IDs a second by width",
        (
            "Left, what a request costs the client's process: level is what one wants. Right, what "
            "that allows where the service takes no time."
        ),
        _width,
    ),
    "queued": (
        "CPU a request by the length of the stream",
        (
            "What a request costs, by what it costs in a short stream a moment later: level is what one "
            "wants. Pale dots are slices of 500 requests, the line goes through their medians; the band is "
            "the goal's 20 %."
        ),
        _queued,
    ),
    "latency": (
        "Percentiles of a request's time by chunk size",
        (
            "How long requests take, eight at once, where the service takes 5 ms and 0.1 ms an ID. "
            "The distance to the dashed line is what both ends add."
        ),
        _latency,
    ),
    "stalls": (
        "How long the event loop stood still",
        (
            "Every wait of a millisecond beside the reading of an inventory of 60 MB, by how much it "
            "was overdrawn. Right of the dashed line the loop stood still for longer than the goal "
            "allows."
        ),
        _stalls,
    ),
}
