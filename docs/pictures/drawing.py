"""Boxes, lines and texts as SVG, in colours that fit a light and a dark page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE: Final = Path(__file__).parent

_STYLE: Final = """\
:root { --ground: #ffffff; --edge: #c9d1dc; --text: #1c2430; --soft: #566275; --box: #eef2f8;
  --strong: #2458b8; --good: #1c7a4a; --plain: #8a6100; --held: #7a3fa0; --bad: #b3261e; --on: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #171b22; --edge: #3b4554; --text: #e8ecf2; --soft: #a9b4c4; --box: #242b36;
    --strong: #8ab4ff; --good: #66d19b; --plain: #e6bd5c; --held: #cf9bf0; --bad: #ff8f87; --on: #171b22; }
}
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  fill: var(--text); }
.mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }"""


class Drawing:
    """A picture that is put together from its parts.

    Args:
        width: In pixels, as all lengths.
        height: Likewise.
        title: What it shows, for those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img" aria-label="{escape(title)}">'
            ),
            f"<title>{escape(title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path d="M0 0 8 4 0 8z" style="fill: var(--soft)"/></marker></defs>'
            ),
        ]
        self.box(0.5, 0.5, width - 1, height - 1, fill="ground", edge="edge", radius=10)

    def box(  # noqa: D102  as its name says
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        edge: str = "",
        radius: float = 6,
        dashed: bool = False,
    ) -> None:
        stroke = f"stroke: var(--{edge})" if edge else "stroke: none"
        dashes = '; stroke-dasharray: 5 4"' if dashed else '"'
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'style="fill: var(--{fill}); {stroke}{dashes}/>'
        )

    def text(  # noqa: D102
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        colour: str = "text",
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        kind = ' class="mono"' if mono else ""
        weight = "; font-weight: 600" if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}"{kind} text-anchor="{anchor}" '
            f'style="font-size: {size:g}px; fill: var(--{colour}){weight}">{escape(text)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, colour: str = "soft") -> None:  # noqa: D102
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" '
            f'style="stroke: var(--{colour}); stroke-width: 1.6" marker-end="url(#tip)"/>'
        )

    def line(self, points: Iterable[tuple[float, float]], *, colour: str, width: float = 1.8) -> None:
        """Draw a line through points, without an arrow."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" style="fill: none; stroke: var(--{colour}); stroke-width: {width:g}"/>'
        )

    def dot(self, x: float, y: float, radius: float, *, fill: str, edge: str) -> None:  # noqa: D102
        self._parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" style="fill: var(--{fill}); stroke: var(--{edge})"/>'
        )

    def svg(self) -> str:
        """Return all of it."""
        return "\n".join([*self._parts, "</svg>", ""])
