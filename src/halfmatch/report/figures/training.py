"""Training curves: one panel an objective and quantity, one colour a dtype, a thin line a seed and a bold mean."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halfmatch import paper
from halfmatch.report.figures import style
from halfmatch.report.figures.style import Drawing, Look
from halfmatch.report.numbers import percent
from halfmatch.report.results import Results
from halfmatch.report.training import SEEDS_FOR_INTERVAL, WINDOW, Floats, band, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Curve:
    """A column of the training log as a row of panels."""

    column: str
    label: str
    scale: str = "linear"
    smooth: bool = True
    limits: tuple[float | None, float | None] | None = None


REWARD = (Curve("reward", "training accuracy\n(mean reward)", limits=(None, 1.02)),)
HEALTH = (
    Curve("k3", "k3\n(nats a token)", "log"),
    Curve("entropy", "entropy\n(nats a token)"),
    Curve("largest_prob_diff", "max |π − μ|", "log", smooth=False),
    Curve("ess_share", "ESS / N", limits=(0, 1.05)),
    Curve("gradient_norm", "gradient norm", "log"),
    Curve("loss_scale", "loss scale", "log", smooth=False),
    Curve("skip_share", "share of steps\nskipped so far", smooth=False),
)


def reward(results: Results) -> Drawing:
    """The reward of every run of the matrix."""
    what = (
        "Mean reward of the rollouts of an iteration, which is the accuracy on the training problems; the dotted line "
        "is the bar of the sanity test"
    )
    return _draw(results, REWARD, "training-reward", "Training accuracy", what, height=2.3)


def health(results: Results) -> Drawing:
    """What to look at where the reward curves part: the mismatch beside entropy, its extremes, and the optimizer."""
    what = (
        "k3, the largest |π − μ| and the effective sample size (ESS, as a share of the N responses) compare the "
        "trainer with the engine on the rollouts of an iteration, before it learns from them; entropy stands "
        "beside them because the mismatch vanishes in every dtype when entropy collapses. Loss scale is FP16's "
        "alone"
    )
    title = "Mismatch, entropy and optimizer during training"
    return _draw(results, HEALTH, "training-health", title, what, height=1.35)


def _draw(results: Results, curves: Sequence[Curve], name: str, title: str, what: str, *, height: float) -> Drawing:
    training = results.config.training
    if training is None:
        raise ValueError("a configuration without a training matrix has no training curves")
    objectives, looks = training.objectives, style.looks(results.config.precisions)
    figure, axes = style.grid(len(curves), len(objectives), width=3.1, height=height, sharex=True, sharey="row")
    for (row, curve), (column, objective) in itertools.product(enumerate(curves), enumerate(objectives)):
        panel = axes[row, column]
        for precision in training.precisions:
            runs = results.training_runs(precision, objective)
            _seeds(panel, [run.series[curve.column] for run in runs], curve, looks[precision], results)
        if curve.column == "reward":
            panel.axhline(paper.SANITY_ACCURACY, color=style.INK, linewidth=0.7, linestyle=":")
        if not panel.collections and not panel.lines:
            style.empty(panel, "no values to show")
        if row == 0:
            panel.set_title(objective)
        if row == len(curves) - 1:
            panel.set_xlabel("iteration")
    for row, curve in enumerate(curves):
        axes[row, 0].set_ylabel(curve.label)
        if curve.scale == "log":
            style.log_y(axes[row])
        if curve.limits:
            axes[row, 0].set_ylim(*curve.limits)
    figure.align_ylabels()
    trained = [
        precision for precision in training.precisions if precision in {run.name.precision for run in results.runs}
    ]
    style.legend(figure, [looks[precision] for precision in trained], marker=False)
    names = ", ".join(looks[precision].label for precision in trained)
    return Drawing(
        name,
        title,
        f"{what}. {_reading(results)}",
        f"{title} over iterations: a column of panels for each of {', '.join(objectives)}, a row for each of "
        f"{', '.join(' '.join(curve.label.split()) for curve in curves)}; lines for {names}.",
        figure,
    )


def _seeds(panel: Axes, values: Sequence[Floats], curve: Curve, look: Look, results: Results) -> None:
    """Draw the runs of one precision and objective."""
    values = [running_mean(one) if curve.smooth else one for one in values]
    if curve.scale == "log":
        values = [np.where(one > 0, one, np.nan) for one in values]
    values = [one for one in values if np.isfinite(one).any()]
    if not values:
        return
    for one in values:
        panel.plot(one, color=look.colour, linewidth=0.5, alpha=0.6, linestyle=look.line)
    if len(values) == 1:
        panel.plot(values[0], color=look.colour, linestyle=look.line)
        return
    together = band(values, results.config.report.confidence)
    iterations = np.arange(len(together.mean))
    panel.fill_between(iterations, together.low, together.high, color=look.colour, alpha=0.15, linewidth=0)
    panel.plot(together.mean, color=look.colour, linestyle=look.line)


def _reading(results: Results) -> str:
    """How to read the lines: what the band is depends on the number of seeds."""
    seeds = sorted({len(results.training_runs(*cell)) for cell in results.matrix} - {0})
    numbers = " or ".join(map(str, seeds)) or "no"
    text = (
        f"Means over the last {WINDOW} iterations, but for extremes, loss scale and skips. Thin lines are the seeds "
        f"({numbers} a precision and objective), the bold line is their mean, as far as all of them got"
    )
    if not seeds or seeds[-1] == 1:
        return f"{text}."
    if seeds[-1] < SEEDS_FOR_INTERVAL:
        return f"{text}; the band spans the lowest and highest seed and is no confidence interval."
    return (
        f"{text}; with {SEEDS_FOR_INTERVAL} seeds or more the band is the {percent(results.config.report.confidence)} "
        "interval of the mean, with fewer it spans the lowest and highest seed."
    )
