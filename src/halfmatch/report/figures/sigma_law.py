"""The σ law in one figure: what was seen of σ, KL and ESS beside what k3 predicts, over lengths and while training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmatch.report import sigma_law as law
from halfmatch.report.figures import style
from halfmatch.report.figures.mismatch import cells_of, points_up, precision_names, setup_names, spoken
from halfmatch.report.figures.style import Drawing
from halfmatch.report.results import Results
from halfmatch.report.sigma_law import MARGIN, Length
from halfmatch.report.training import WINDOW, TrainingRun, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OFFLINE = ("σ of Σd\n(nats)", "σ seen /\nσ by the law", "KL of responses\n(nats)", "ESS / N")
TRAINING = ("in training:\nσ seen / by the law", "in training:\nESS / N")


def draw(results: Results) -> Drawing:
    """A column a setup over lengths, and below them a column an objective over iterations."""
    setups, looks = results.setups, style.looks(results.config.precisions)
    objectives = list(dict.fromkeys(run.name.objective for run in results.runs))
    names = (*OFFLINE, *(TRAINING if objectives else ()))
    figure, axes = style.grid(
        len(names), max(len(setups), len(objectives)), width=2.6, height=1.45, sharex="row", sharey="row"
    )
    for column, setup in enumerate(setups):
        for rank, cell in enumerate(cells_of(results, setup)):
            _offline(axes[: len(OFFLINE), column], law.of_cell(cell), looks[cell.precision], rank)
        axes[0, column].set_title(results.setup_label(setup))
        axes[len(OFFLINE) - 1, column].set_xlabel("length (tokens)")
    for column, objective in enumerate(objectives):
        runs = [run for run in results.runs if run.name.objective == objective]
        for run in runs:
            _training(axes[len(OFFLINE) :, column], run, looks[run.name.precision])
        axes[len(OFFLINE), column].set_title(objective)
        axes[-1, column].set_xlabel("iteration")
    _finish(axes, len(setups), len(objectives))
    for panel, name in zip(axes[:, 0], names, strict=True):
        panel.set_ylabel(name)
    figure.align_ylabels()
    trained = {run.name.precision for run in results.runs}
    shown = [name for name in results.config.precisions if name in {*results.measured_precisions, *trained}]
    style.legend(figure, [looks[name] for name in shown])
    return Drawing("sigma-law", "The σ law", _caption(bool(objectives)), _alt(results, objectives), figure)


def _offline(panels: Sequence[Axes], lengths: Sequence[Length], look: style.Look, rank: int) -> None:
    """One measurement: points for what was seen, lines for the law, a band for what is proved."""
    sigma, ratio, kl, ess = panels
    aside = 1.03**rank  # so that intervals side by side can be told apart
    for hollow in (False, True):
        rows = [one for one in lengths if one.is_whole is hollow]
        at = [one.length for one in rows]
        points_up(sigma, at, [one.sigma for one in rows], look, joined=False, hollow=hollow)
        besides = [aside * length for length in at]
        points_up(ratio, besides, [one.over_law for one in rows], look, joined=False, hollow=hollow)
        points_up(ess, at, [one.ess for one in rows], look, joined=False, hollow=hollow)
        above = [one for one in rows if one.kl.low > 0]  # the axis is logarithmic
        points_up(kl, [one.length for one in above], [one.kl for one in above], look, joined=False, hollow=hollow)
    ordered = sorted(lengths, key=lambda one: one.length)
    at = [one.length for one in ordered]
    for panel, predicted in (
        (sigma, [one.sigma_law.value for one in ordered]),
        (kl, [one.kl_law.value for one in ordered]),
        (ess, [one.ess_law.value for one in ordered]),
    ):
        panel.plot(at, predicted, color=look.colour, linestyle=look.line, linewidth=1)
    bounds = np.array([one.bounds for one in ordered]).reshape(-1, 2)
    ratio.fill_between(at, bounds[:, 0], bounds[:, 1], color=look.colour, alpha=0.12, linewidth=0)


def _training(panels: Sequence[Axes], run: TrainingRun, look: style.Look) -> None:
    """One run: σ over the law, and ESS beside the law (dotted)."""
    ratio, ess = panels
    predicted = law.training_law(run)
    for panel, values, line in (
        (ratio, predicted["over"], look.line),
        (ess, run.series["ess_share"], look.line),
        (ess, predicted["ess_share"], ":"),
    ):
        panel.plot(running_mean(values), color=look.colour, linestyle=line, linewidth=0.8, alpha=0.9)


def _finish(axes: Any, setups: int, objectives: int) -> None:
    """Scales, lines of reference, and no panel without anything in it."""
    from matplotlib.ticker import StrMethodFormatter

    for row in (0, 2):
        style.log_y(axes[row])
    for row in (1, *((len(OFFLINE),) if objectives else ())):
        for panel, (place, line) in itertools.product(axes[row], ((1 / MARGIN, ":"), (1, "-"), (MARGIN, ":"))):
            panel.axhline(place, color=style.INK, linewidth=0.5, linestyle=line, zorder=1)
        axes[row, 0].set_ylim(0.5, 2)
    for row in (3, *((len(axes) - 1,) if objectives else ())):
        axes[row, 0].set_ylim(0, 1.05)
    low, high = axes[0, 0].get_xlim()
    if high >= 2 * low > 0:
        for row in range(len(OFFLINE)):
            style.log_x(axes[row, 0], base=2)
            axes[row, 0].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for row in range(len(axes)):
        for column in range(setups if row < len(OFFLINE) else objectives, axes.shape[1]):
            axes[row, column].remove()


def _caption(is_trained: bool) -> str:
    text = (
        "If d is noise of variance 2k a token, k being k3, then over T tokens KL = kT, σ = √(2kT) and ESS/N = "
        "exp(−2kT): the lines. Points are what was seen, with their intervals: full ones of responses that reach a "
        "length, cut there, hollow ones of whole responses at their mean length. Bands in the second row are what is "
        f"proved without assuming noise, and the dotted lines a factor of {MARGIN:g}. A KL whose interval "
        "reaches 0 is left out. An ESS of a few responses is itself noisy and too high."
    )
    if not is_trained:
        return text
    return f"{text} Below, every run while it trains: means over {WINDOW} iterations, for ESS/N the law dotted."


def _alt(results: Results, objectives: Sequence[str]) -> str:
    below = f" Below, the same ratio and ESS over iterations for {', '.join(objectives)}." if objectives else ""
    return (
        "Standard deviation of Σd, its ratio to the law, KL of whole responses and effective sample size against "
        f"length, a column for each of {setup_names(results)}; points for what was seen and lines for the law, in "
        f"{precision_names(results)}. {spoken(results, 'sigma', 'σ seen')} "
        f"{spoken(results, 'sigma_predicted', 'σ by the law')}{below}"
    )
