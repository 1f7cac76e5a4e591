"""Every pair of rollout and train dtype as a heat map: what was measured offline, and what short trainings reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmatch.report.figures import style
from halfmatch.report.figures.style import Drawing
from halfmatch.report.numbers import interval, number, percent, with_interval
from halfmatch.report.results import MismatchCell, Results, Setup
from halfmatch.report.training import SEEDS_FOR_INTERVAL, WINDOW, band
from halfmatch.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place = tuple[int, int]  # row and column of a heat map

_METRICS = (("k3", "k3 (nats a token)", True), ("ess_share", "ESS / N", False))
# Below this k3 is the rounding of fp32 log-probs and no mismatch; it has the lightest colour.
_SMALLEST_K3 = 1e-9
_COLOURS = "cividis"
# Not quite black and white, which the page replaces by its theme's.
_DARK, _LIGHT = "#010101", "#fefefe"


def heat_maps(results: Results) -> Drawing:
    """k3 and ESS/N of each pair, a row of panels a setup, and what training in it reached, for the model that was
    trained; precisions outside of the grid in a column of their own."""
    names = results.config.mismatch.grid
    others = [name for name in results.config.mismatch.precisions if name not in names]
    setups, trained = results.setups, _trained(results, names, others)
    rows = [*names, *others]
    width = 0.85 * (len(names) + bool(others)) + 0.9
    figure, axes = style.grid(len(setups), len(_METRICS) + len(trained), width=width, height=0.42 * len(rows) + 0.7)
    for row, setup in enumerate(setups):
        cells = _cells(results, setup, names, others)
        maps = [
            (title, {place: cell.metric(name) for place, cell in cells.items()}, is_logarithmic)
            for name, title, is_logarithmic in _METRICS
        ]
        is_trained = setup.model == results.config.solvability.model
        maps += [
            (f"reward, {objective}", rewards if is_trained else {}, False) for objective, rewards in trained.items()
        ]
        for column, (title, estimates, is_logarithmic) in enumerate(maps):
            panel = axes[row, column]
            if not estimates:
                panel.set_axis_off()
                continue
            _heat(panel, estimates, (len(rows), len(names) + bool(others)), is_logarithmic=is_logarithmic)
            panel.set_yticks(np.arange(len(rows)) + 0.5, [style.label(one) for one in rows])
            columns = [*map(style.label, names), *(["as the\nengine"] if others else [])]
            panel.set_xticks(np.arange(len(columns)) + 0.5, columns)
            panel.set_title(f"{results.setup_label(setup)}: {title}")
            panel.set_ylabel("engine" if column == 0 else "")
            panel.set_xlabel("trainer" if row == len(setups) - 1 else "")
    aside = f" {', '.join(map(style.label, others))}: the same on both sides, in the last column." if others else ""
    return Drawing(
        "grid",
        "The precision grid",
        "Responses sampled in the dtype of a row and scored in the dtype of a column: k3 in nats a token, and the "
        f"effective sample size as a share of the responses. Below each number its "
        f"{percent(results.config.report.confidence)} interval over problems. Where the dtypes differ, so do the "
        f"rounded weights, which is a mismatch that no kernel can take away.{aside}{_about_rewards(results, trained)}",
        "Heat maps of k3 and effective sample size. "
        + " ".join(
            f"{results.setup_label(setup)}, {style.label(cell.rollout)} scored in {style.label(cell.train)}: "
            f"k3 {with_interval(cell.metric('k3'))}, ESS/N {with_interval(cell.metric('ess_share'))}."
            for setup in setups
            for cell in _cells(results, setup, names, others).values()
        )
        + _spoken_rewards(trained, rows, len(names)),
        figure,
    )


def _cells(results: Results, setup: Setup, names: tuple[str, ...], others: list[str]) -> dict[Place, MismatchCell]:
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


def _trained(results: Results, names: tuple[str, ...], others: list[str]) -> dict[str, dict[Place, Estimate]]:
    """By objective: the reward at the end of the runs of each pair, their mean and, in the place of an interval, what
    `band` makes of the seeds."""
    known = results.config.precisions
    rows = {(known[name].rollout, known[name].fp32_modules): row for row, name in enumerate(names)}
    columns = {(known[name].compute, known[name].fp32_modules): column for column, name in enumerate(names)}
    found: dict[str, dict[Place, Estimate]] = {}
    for precision, objective in results.matrix:
        wide = known[precision].fp32_modules
        row, column = rows.get((known[precision].rollout, wide)), columns.get((known[precision].compute, wide))
        if precision in others:
            row, column = len(names) + others.index(precision), len(names)
        runs = results.training_runs(precision, objective)
        if runs and row is not None and column is not None:
            seeds = band([run.reward for run in runs], results.config.report.confidence)
            ends = Estimate(*(float(curve[-1]) for curve in (seeds.mean, seeds.low, seeds.high)))
            found.setdefault(objective, {})[row, column] = ends
    return found


def _spoken_rewards(trained: Mapping[str, Mapping[Place, Estimate]], rows: list[str], pairs: int) -> str:
    """The rewards as sentences, for readers who do not see the figure."""
    return "".join(
        f" Trained by {objective}, the engine in {style.label(rows[row])} and the trainer in "
        f"{style.label(rows[column if row < pairs else row])}: reward {with_interval(reward)}."
        for objective, rewards in trained.items()
        for (row, column), reward in rewards.items()
    )


def _about_rewards(results: Results, trained: Mapping[str, object]) -> str:
    if not trained:
        return ""
    seeds = sorted({len(results.training_runs(*cell)) for cell in results.matrix} - {0})
    what = "the lowest and highest seed, which is no confidence interval"
    if seeds[0] >= SEEDS_FOR_INTERVAL:
        what = f"the {percent(results.config.report.confidence)} interval of the mean"
    iterations = results.config.training.iterations if results.config.training else 0
    return (
        f" Reward: of training in each pair, the mean over the last {WINDOW} of {iterations} iterations and over "
        f"{' or '.join(map(str, seeds))} seeds; below it {what}."
    )


def _heat(panel: Axes, cells: Mapping[Place, Estimate], shape: Place, *, is_logarithmic: bool) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    values = np.full(shape, np.nan)
    for place, estimate in cells.items():
        values[place] = estimate.value
    scale: Any = Normalize(0, 1)
    if is_logarithmic:
        values = np.maximum(values, _SMALLEST_K3)  # NaN stays NaN
        scale = LogNorm(_SMALLEST_K3, max(1.0, float(np.nanmax(values, initial=1.0))))
    colours = colormaps[f"{_COLOURS}_r" if is_logarithmic else _COLOURS]
    panel.pcolormesh(values, cmap=colours, norm=scale, edgecolors="white", linewidth=1)
    panel.invert_yaxis()
    panel.grid(False)
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)
    for (row, column), estimate in cells.items():
        if math.isnan(estimate.value):
            continue
        red, green, blue, _ = colours(scale(values[row, column]))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        words = f"{number(estimate.value, 2)}\n{interval(estimate, 2)}".rstrip()
        panel.text(
            column + 0.5, row + 0.5, words, ha="center", va="center", fontsize=5.5, color=_LIGHT if is_dark else _DARK
        )
