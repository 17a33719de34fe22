"""The picture of the page: what is answered and sent in and after a storm, by each client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from pressure.cells import SHORT_STORM
from pressure.peers import ADAPTIVE, FIFO, SEMAPHORE
from pressure.trial import within

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pressure.trial import Seen

_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#555555"
"""Colours that colour-blind readers can distinguish."""

_STYLES: Final = {
    SEMAPHORE: {"color": _GREEN, "linewidth": 1.5, "linestyle": "--"},
    FIFO: {"color": _PURPLE, "linewidth": 1.5, "linestyle": "-."},
    ADAPTIVE: {"color": _ORANGE, "linewidth": 2.0, "linestyle": "-"},
}
_OURS: Final = {"color": _BLUE, "linewidth": 2.5, "linestyle": "-"}
_STEP: Final = 0.1
_WINDOW: Final = 1.0


def draw(seen: Sequence[Seen], file: Path) -> None:
    """Draw those of the cell with the storm, a click and a fan-out."""
    chosen = [each for each in seen if each.cell.service == SHORT_STORM and each.cell.has_bulk]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8.5, 6.2), sharex=True, layout="constrained")
    trouble, seconds = SHORT_STORM.trouble, chosen[0].cell.seconds
    assert trouble is not None
    middles = [number * _STEP + _WINDOW / 2 for number in range(int((seconds - _WINDOW) / _STEP) + 1)]
    for each in reversed(chosen):  # ours last, on top
        style = _STYLES.get(each.who, _OURS)
        for axes, moments in ((above, each.answered), (below, each.sent)):
            rates = [within(moments, at - _WINDOW / 2, at + _WINDOW / 2) / _WINDOW for at in middles]
            axes.plot(middles, rates, label=each.who, **style)
    for axes, what in ((above, "answered in time, a second"), (below, "sent, a second")):
        axes.axvspan(trouble.begin, trouble.end, color=_GREY, alpha=0.15, linewidth=0)
        axes.set_ylabel(what)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    above.set_ylim(0)
    above.text((trouble.begin + trouble.end) / 2, 3, "storm", color=_GREY, ha="center")
    below.set_yscale("symlog", linthresh=10)
    below.set_yticks([0, 10, 40, 100, 400, 1000], ["0", "10", "40", "100", "400", "1,000"])
    below.minorticks_off()
    below.set_ylim(0)
    below.set_xlim(0, seconds)
    below.set_xlabel("seconds")
    lines, names = above.get_legend_handles_labels()
    figure.legend(lines[::-1], names[::-1], loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)
