"""Every pair of rollout and train dtype as a heat map."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmatch.report.figures import style
from halfmatch.report.figures.style import Drawing
from halfmatch.report.numbers import interval, number, percent
from halfmatch.report.results import MismatchCell, Results, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_METRICS = (("k3", "k3 (nats a token)"), ("ess_share", "ESS / N"))
# Below this k3 is the rounding of fp32 log-probs and no mismatch; it has the lightest colour.
_SMALLEST_K3 = 1e-9
_COLOURS = "cividis"
# Not quite black and white, which the page replaces by its theme's.
_DARK, _LIGHT = "#010101", "#fefefe"


def heat_maps(results: Results) -> Drawing:
    """k3 and ESS/N of each pair, a row of panels a setup; precisions outside of the grid in a column of their own."""
    names = results.config.mismatch.grid
    others = [name for name in results.config.mismatch.precisions if name not in names]
    setups = results.setups
    rows = [*names, *others]
    width = 0.85 * (len(names) + bool(others)) + 0.9
    figure, axes = style.grid(len(setups), len(_METRICS), width=width, height=0.42 * len(rows) + 0.7)
    for (row, column), panel in np.ndenumerate(axes):
        name, title = _METRICS[column]
        cells = _cells(results, setups[row], names, others)
        _heat(panel, name, cells, (len(rows), len(names) + bool(others)))
        panel.set_yticks(np.arange(len(rows)) + 0.5, [style.label(one) for one in rows])
        columns = [*map(style.label, names), *(["as the\nengine"] if others else [])]
        panel.set_xticks(np.arange(len(columns)) + 0.5, columns)
        panel.set_title(f"{results.setup_label(setups[row])}: {title}")
        panel.set_ylabel("engine" if column == 0 else "")
        panel.set_xlabel("trainer" if row == len(setups) - 1 else "")
    aside = f" {', '.join(map(style.label, others))}: the same on both sides, in the last column." if others else ""
    return Drawing(
        "grid",
        "The precision grid",
        "Responses sampled in the dtype of a row and scored in the dtype of a column: k3 in nats a token, and the "
        f"effective sample size as a share of the responses. Below each number its "
        f"{percent(results.config.report.confidence)} interval over problems. Where the dtypes differ, so do the "
        f"rounded weights, which is a mismatch that no kernel can take away.{aside}",
        "Heat maps of k3 and effective sample size. "
        + " ".join(
            f"{results.setup_label(setup)}, {style.label(cell.rollout)} scored in {style.label(cell.train)}: "
            f"k3 {number(cell.metric('k3').value)}, ESS/N {number(cell.metric('ess_share').value)}."
            for setup in setups
            for cell in _cells(results, setup, names, others).values()
        ),
        figure,
    )


def _cells(
    results: Results, setup: Setup, names: tuple[str, ...], others: list[str]
) -> dict[tuple[int, int], MismatchCell]:
    """The cells of a setup by row and column of its heat maps."""
    places = {
        (rollout, train): (row, column) for row, rollout in enumerate(names) for column, train in enumerate(names)
    }
    places |= {(name, name): (len(names) + row, len(names)) for row, name in enumerate(others)}
    return {
        places[cell.rollout, cell.train]: cell
        for cell in [*results.cells, *results.crossed]
        if cell.setup == setup and (cell.rollout, cell.train) in places
    }


def _heat(panel: Axes, name: str, cells: dict[tuple[int, int], MismatchCell], shape: tuple[int, int]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    values = np.full(shape, np.nan)
    for place, cell in cells.items():
        values[place] = cell.metric(name).value
    scale: Any = Normalize(0, 1)
    if name == "k3":
        values = np.maximum(values, _SMALLEST_K3)  # NaN stays NaN
        scale = LogNorm(_SMALLEST_K3, max(1.0, float(np.nanmax(values, initial=1.0))))
    colours = colormaps[_COLOURS if name == "ess_share" else f"{_COLOURS}_r"]
    panel.pcolormesh(values, cmap=colours, norm=scale, edgecolors="white", linewidth=1)
    panel.invert_yaxis()
    panel.grid(False)
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)
    for (row, column), cell in cells.items():
        estimate = cell.metric(name)
        if math.isnan(estimate.value):
            continue
        red, green, blue, _ = colours(scale(values[row, column]))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        words = f"{number(estimate.value, 2)}\n{interval(estimate, 2)}".rstrip()
        panel.text(
            column + 0.5, row + 0.5, words, ha="center", va="center", fontsize=5.5, color=_LIGHT if is_dark else _DARK
        )
