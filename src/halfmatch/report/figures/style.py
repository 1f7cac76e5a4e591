"""How every figure looks, and how it is written: one colour a dtype, the same bytes for the same numbers."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halfmatch.artifacts import atomic
from halfmatch.report.numbers import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from halfmatch.precision import Precision

# Okabe and Ito's palette, the members that keep a contrast of 3:1 on white and on a dark page.
COLOURS: dict[str, str] = {"bf16": "#d55e00", "fp16": "#0072b2", "fp32": "#009e73"}
Line = Literal["-", "--", ":", "-."]
_LINES: tuple[Line, ...] = ("-", "--", ":", "-.")
_MARKERS = {"bf16": "sDPX", "fp16": "ovph", "fp32": "^<>d"}

# Ink and grid are colours that nothing else uses, so that the page can replace them by its own theme's; its
# background shows where a figure is white.
INK = "#1b1b1b"
GRID = "#d9d9d9"
_THEMED = {INK: "currentColor", GRID: "var(--grid)", "fill: #ffffff": "fill: none"}

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.formatter.limits": (-3, 4),
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "savefig.dpi": 200,
    "svg.fonttype": "path",
    "svg.hashsalt": "halfmatch",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 7.5,
    "ytick.color": INK,
    "ytick.labelsize": 7.5,
}


@dataclass(frozen=True)
class Drawing:
    """A figure with what a reader needs beside it: `alt` says what is seen, `caption` how to read it."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


@dataclass(frozen=True)
class Look:
    """How one precision is drawn, in every figure: the colour says in what the trainer computes."""

    label: str
    colour: str
    marker: str
    line: Line


def looks(precisions: Mapping[str, Precision]) -> dict[str, Look]:
    """A look for each precision of a configuration; those of one compute dtype differ in marker and line."""
    result: dict[str, Look] = {}
    for name, precision in precisions.items():
        dtype = precision.compute
        before = sum(other.colour == COLOURS[dtype] for other in result.values()) % len(_LINES)
        result[name] = Look(label(name), COLOURS[dtype], _MARKERS[dtype][before], _LINES[before])
    return result


def label(precision: str) -> str:
    """The name of a precision as text shows it: BF16, FP16 and FP32 as usual, others as configured."""
    return precision.upper() if precision in COLOURS else precision


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save inside this block; matplotlib's settings are as before afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def grid(rows: int, columns: int, *, width: float = 2.5, height: float = 2.1, **shared: Any) -> tuple[Figure, Any]:
    """Small multiples: a figure and its [rows, columns] axes, each panel `width` × `height` inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns + 0.6, height * rows + 0.5), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def legend(figure: Figure, looks: Iterable[Look], *, line: bool = True, marker: bool = True) -> None:
    """One legend for all panels, above them."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=look.colour,
            linestyle=look.line if line else "none",
            marker=look.marker if marker else "none",
            label=look.label,
        )
        for look in looks
    ]
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))


def log_y(panels: Sequence[Axes]) -> None:
    """A logarithmic y axis for panels that share it, with few ticks, labelled between decades where it spans less than
    two. Where nothing lies above zero it stays linear."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    if not any(math.isfinite(panel.yaxis.get_minpos()) for panel in panels):
        return
    panels[0].set_yscale("log")
    axis, (low, high) = panels[0].yaxis, panels[0].get_ylim()
    if high / low >= 100:
        axis.set_minor_formatter(NullFormatter())
        return
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 1)))
    axis.set_minor_locator(NullLocator())


def log_x(panel: Axes, base: float = 10) -> None:
    """A logarithmic x axis, where something lies above zero."""
    if math.isfinite(panel.xaxis.get_minpos()):
        panel.set_xscale("log", base=base)


def empty(axes: Axes, why: str) -> None:
    """A panel without data says so in words."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", wrap=True, fontsize=8)


@dataclass(frozen=True)
class Rendered:
    """A drawing as files on white; the same drawing gives the same bytes."""

    svg: str
    png: bytes


def render(drawing: Drawing) -> Rendered:
    """Draw once for both formats: the layout is found once and then stays."""
    figure, svg, png = drawing.figure, io.BytesIO(), io.BytesIO()
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    # Text is a little wider at the dots of a PNG than in the layout: tight, so that long labels are not cut off.
    figure.savefig(png, format="png", metadata={"Software": None}, facecolor="white", bbox_inches="tight")
    return Rendered(svg.getvalue().decode(), png.getvalue())


def write(rendered: Rendered, name: str, folder: Path) -> None:
    """Write NAME.svg and NAME.png."""
    for suffix, content in (("svg", rendered.svg.encode()), ("png", rendered.png)):
        with atomic(folder / f"{name}.{suffix}") as file:
            file.write(content)


def inline_svg(rendered: Rendered, name: str, alt: str) -> str:
    """The figure as an element of the page: in the page's colours, with ids that no other figure uses."""
    svg = rendered.svg[rendered.svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, themed in _THEMED.items():
        svg = svg.replace(colour, themed)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1).strip()
