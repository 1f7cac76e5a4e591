"""Accuracy along the training, on problems that are not trained on: the paper's main figure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from halfmatch.report import validation
from halfmatch.report.figures import style
from halfmatch.report.figures.style import Drawing, Look
from halfmatch.report.numbers import percent
from halfmatch.report.results import Results
from halfmatch.report.training import SEEDS_FOR_INTERVAL, band
from halfmatch.report.validation import Mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(results: Results) -> Drawing:
    """A row of panels a benchmark, a column an objective, a colour a precision."""
    training, evaluation = results.config.training, results.config.evaluation
    if training is None or evaluation is None:
        raise ValueError("a configuration without training and evaluation has no curves of accuracy")
    known, looks = validation.curves(results), style.looks(results.config.precisions)
    settings, objectives = validation.drawn(results, known), training.objectives
    figure, axes = style.grid(len(settings), len(objectives), width=3.1, height=2.3, sharex=True, sharey="row")
    shown: dict[str, None] = {}
    for (row, setting), (column, objective) in itertools.product(enumerate(settings), enumerate(objectives)):
        panel = axes[row, column]
        found = validation.means(results, setting, objective, known)
        for precision, one in found.items():
            _curve(panel, one, looks[precision], results.config.report.confidence)
        shown |= dict.fromkeys(found)
        if not found:
            style.empty(panel, "no values to show")
        if row == 0:
            panel.set_title(objective)
        if row == len(settings) - 1:
            panel.set_xlabel("iteration")
        if column == 0:
            panel.set_ylabel(f"{setting.benchmark}\n(avg@{evaluation.samples})")
    figure.align_ylabels()
    style.legend(figure, [looks[precision] for precision in training.precisions if precision in shown])
    names = ", ".join(looks[precision].label for precision in training.precisions if precision in shown)
    where = "; ".join(dict.fromkeys(validation.deployed_in(setting) for setting in settings))
    title = "Accuracy along the training"
    return Drawing(
        "validation",
        title,
        f"Mean share of correct responses, {evaluation.samples} a problem, by the number of iterations; the weights "
        f"are deployed in {where}. {_reading(results)}",
        f"{title} over iterations: a column of panels for each of {', '.join(objectives)}, a row for each of "
        f"{', '.join(setting.benchmark for setting in settings)}; lines for {names}.",
        figure,
    )


def _curve(panel: Axes, one: Mean, look: Look, confidence: float) -> None:
    """The seeds of one precision and objective: thin lines, their mean and a band."""
    iterations = list(one.scores)
    values = np.array([score.value for score in one.scores.values()])
    if len(one.curves) == 1:
        low, high = (np.array([getattr(score, side) for score in one.scores.values()]) for side in ("low", "high"))
    else:
        for curve in one.curves:
            scores = [score.value for score in curve.scores.values()]
            panel.plot(list(curve.scores), scores, color=look.colour, linewidth=0.5, alpha=0.6, linestyle=look.line)
        together = band([np.array([curve.scores[at].value for at in iterations]) for curve in one.curves], confidence)
        low, high = together.low, together.high
    panel.fill_between(iterations, low, high, color=look.colour, alpha=0.15, linewidth=0)
    panel.plot(iterations, values, color=look.colour, linestyle=look.line, marker=look.marker, markersize=3)


def _reading(results: Results) -> str:
    """How to read lines and bands, which depends on the number of seeds."""
    seeds = _numbers_of_seeds(results)
    confidence = percent(results.config.report.confidence)
    if seeds[-1:] == [1]:
        return f"The band is the {confidence} interval over problems, of a single run."
    text = (
        f"Thin lines are the seeds ({' or '.join(map(str, seeds))} a precision and objective), the bold line is their "
        "mean where all of them have a score"
    )
    if seeds and seeds[-1] >= SEEDS_FOR_INTERVAL:
        return (
            f"{text}; with {SEEDS_FOR_INTERVAL} seeds or more the band is the {confidence} interval of the mean, with "
            "fewer it spans the lowest and highest seed."
        )
    return f"{text}; the band spans the lowest and highest seed and is no confidence interval."


def _numbers_of_seeds(results: Results) -> Sequence[int]:
    cells: dict[tuple[str, str], set[int]] = {}
    for cell in results.validations:
        cells.setdefault((cell.run.precision, cell.run.objective), set()).add(cell.run.seed)
    return sorted({len(seeds) for seeds in cells.values()})
