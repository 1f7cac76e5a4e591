"""The mismatch of π and μ at fixed weights: the paper's panels, and where they come from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmatch.report.figures import style
from halfmatch.report.figures.style import Drawing, Look
from halfmatch.report.numbers import percent, with_interval
from halfmatch.report.results import MismatchCell, Results, Setup, estimate
from halfmatch.report.scores import DIFFERENCE_BINS, Floats
from halfmatch.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def tokens(results: Results) -> Drawing:
    """π against μ as probabilities, a panel a setup and precision."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    counts = [cell.panels.probabilities.max(initial=1) for cell in results.cells if cell.panels]
    norm = LogNorm(1, max([10, *counts]))

    def draw(panel: Axes, cell: MismatchCell, look: Look) -> str:
        assert cell.panels is not None
        shades = LinearSegmentedColormap.from_list("", [(look.colour, 0.25), (look.colour, 1.0)])
        seen = np.ma.masked_equal(cell.panels.probabilities.T, 0)
        panel.imshow(
            seen, norm=norm, cmap=shades, origin="lower", extent=(0, 1, 0, 1), interpolation="nearest", zorder=2
        )
        panel.plot([0, 1], [0, 1], color=style.INK, linewidth=0.5, zorder=1)
        return f"{look.label}\nk3 {with_interval(cell.metric('k3'), 2)}"

    figure = _setups_by_precisions(
        results, draw, "μ, engine's probability", "π, trainer's\nprobability", size=1.75, aspect="equal"
    )
    return Drawing(
        "mismatch-tokens",
        "Token probabilities: trainer against engine",
        "Every sampled token by the probability that the engine drew it with (μ) and the one that the trainer "
        "gives it (π); the stronger the colour, the more tokens (logarithmic). Without a mismatch all lie on the "
        "diagonal. k3 estimates KL[μ‖π] in nats a token.",
        "Grid of two-dimensional histograms of token probabilities, a row for each of "
        f"{setup_names(results)}, a column for each of {precision_names(results)}. {spoken(results, 'k3', 'k3')}",
        figure,
    )


def sequences(results: Results) -> Drawing:
    """Σd of every response against its length, with the least-squares line."""

    def draw(panel: Axes, cell: MismatchCell, look: Look) -> str:
        assert cell.panels is not None
        lengths, log_ratios = cell.panels.lengths, cell.panels.log_ratios
        finite = np.isfinite(log_ratios)
        panel.axhline(0, color=style.INK, linewidth=0.5, zorder=1)
        panel.plot(
            lengths[finite],
            log_ratios[finite],
            look.marker,
            color=look.colour,
            markersize=2.5,
            alpha=max(0.15, min(0.7, 60 / max(1, len(lengths)))),
            markeredgewidth=0,
            rasterized=len(lengths) > 2000,
        )
        slope = cell.metric("slope_per_1k")
        if math.isfinite(slope.value):
            ends = np.array([lengths[finite].min(), lengths[finite].max()])
            line = log_ratios[finite].mean() + slope.value / 1000 * (ends - lengths[finite].mean())
            panel.plot(ends, line, color=style.INK, linewidth=1.2)
        kl = with_interval(cell.metric("kl_sequence"), 2)
        return f"{look.label}\nKL {kl}\nslope {with_interval(slope, 2)}"

    figure = _setups_by_precisions(results, draw, "length (tokens)", "Σd = log π/μ of a\nresponse (nats)", size=2.3)
    return Drawing(
        "mismatch-sequences",
        "Log-ratio of whole responses against their length",
        "One point a response. d = log π − log μ on a sampled token, Σd its sum over the response; the mean of "
        "−Σd is KL[μ‖π] of whole responses, in nats. The slanted line is the least-squares fit, its slope in nats "
        "per 1,000 tokens; where all responses are about as long, the slope says little and its interval is wide. "
        "Panels of a row share their vertical axis.",
        "Grid of scatter plots of the log-ratio of responses against length, a row for each of "
        f"{setup_names(results)}, a column for each of {precision_names(results)}. "
        f"{spoken(results, 'slope_per_1k', 'slope in nats per 1,000 tokens')}",
        figure,
    )


def differences(results: Results) -> Drawing:
    """The distribution of |d| over tokens."""
    centres = np.sqrt(DIFFERENCE_BINS[:-1] * DIFFERENCE_BINS[1:])

    def draw(panel: Axes, cell: MismatchCell, look: Look) -> None:
        if cell.panels is None or not cell.panels.tokens:
            return
        share = cell.panels.differences / cell.panels.tokens
        panel.fill_between(centres, share, step="mid", color=look.colour, alpha=0.15, linewidth=0)
        panel.step(centres, share, where="mid", color=look.colour, linestyle=look.line)
        style.log_x(panel)

    drawn = [
        cell.panels.differences.nonzero()[0] for cell in results.cells if cell.panels and cell.panels.differences.any()
    ]
    figure = _panel_a_setup(results, draw, "|d| = |log π − log μ| (nats)", "share of tokens", height=2.0)
    if drawn:
        first, last = min(bins[0] for bins in drawn), max(bins[-1] for bins in drawn)
        figure.axes[0].set_xlim(DIFFERENCE_BINS[first], DIFFERENCE_BINS[last + 1])
    zeros = "; ".join(
        f"{results.setup_label(cell.setup)} {style.label(cell.precision)} "
        f"{percent(cell.panels.zeros / cell.panels.tokens, 1)}"
        for cell in results.cells
        if cell.panels and cell.panels.tokens
    )
    return Drawing(
        "mismatch-differences",
        "How large the difference is, token by token",
        "Share of the sampled tokens by |d|, five bins a decade. Tokens with d exactly 0 have no place on a "
        f"logarithmic axis and are left out: {zeros or 'none'}.",
        f"Histograms of the absolute log-ratio of tokens on a logarithmic axis, a panel for each of "
        f"{setup_names(results)}, a line for each of {precision_names(results)}.",
        figure,
    )


def positions(results: Results) -> Drawing:
    """k3 by position in the response."""
    rows = [row for cell in results.cells for row in cell.analysis["positions"]]
    labels = {row["start"]: f"{row['start']}–{row['stop'] - 1 if row['stop'] else ''}" for row in rows}
    places = {start: place for place, start in enumerate(sorted(labels))}

    def draw(panel: Axes, cell: MismatchCell, look: Look) -> None:
        buckets = cell.analysis["positions"]
        points_up(panel, [places[row["start"]] for row in buckets], [estimate(row["k3"]) for row in buckets], look)
        panel.set_xticks(list(places.values()), [labels[start] for start in places], rotation=30, ha="right")

    figure = _panel_a_setup(results, draw, "position in the response (tokens)", "k3 (nats a token)", height=2.0)
    style.log_y(figure.axes)
    return Drawing(
        "mismatch-positions",
        "Mismatch by position in the response",
        f"k3 over the tokens of each stretch of positions, with {_interval(results)}s over problems.",
        f"k3 by position, a panel for each of {setup_names(results)}, a line for each of {precision_names(results)}.",
        figure,
    )


def fidelity(results: Results) -> Drawing:
    """Cosine of each objective's gradient with the one that fp32 gives without a mismatch."""
    setups, looks = results.setups, style.looks(results.config.precisions)
    objectives = list(dict.fromkeys(name for cell in results.cells for name in (cell.objectives)))
    figure, axes = style.grid(1, len(setups), width=2.4, height=0.45 + 0.42 * len(objectives), sharex=True, sharey=True)
    for column, setup in enumerate(setups):
        panel = axes[0, column]
        cells = [cell for cell in cells_of(results, setup) if cell.objectives]
        for rank, cell in enumerate(cells):
            places = np.arange(len(objectives)) + (rank - (len(cells) - 1) / 2) * 0.22
            values = [cell.cosine(objective) for objective in objectives]
            points_across(panel, values, places, looks[cell.precision])
        panel.axvline(1, color=style.INK, linewidth=0.5, zorder=1)
        panel.axvline(0, color=style.INK, linewidth=0.5, zorder=1)
        panel.set_title(results.setup_label(setup))
        panel.set_xlabel("cosine with the exact gradient")
        panel.set_yticks(np.arange(len(objectives)), objectives)
        panel.set_ylim(len(objectives) - 0.5, -0.5)
        if not cells:
            style.empty(panel, "not computed")
    style.legend(figure, [looks[name] for name in results.measured_precisions])
    return Drawing(
        "gradient-fidelity",
        "Gradient fidelity",
        "Cosine of the gradient that each objective gives the trainer with the gradient there would be without a "
        "mismatch: fp32 throughout, same weights, same responses, every ratio 1. 1 is the same direction, 0 "
        f"nothing of it. Bars are {_interval(results)}s over blocks of problems.",
        f"Cosines of gradients with fp32's, a panel for each of {setup_names(results)}, a row for each of "
        f"{', '.join(objectives) or 'no objective'}. {_spoken_cosines(results)}",
        figure,
    )


# ------------------------------------------------------------------------------------------------------------ layouts
def _setups_by_precisions(
    results: Results,
    draw: Callable[[Axes, MismatchCell, Look], str],
    across: str,
    up: str,
    *,
    size: float,
    aspect: str = "auto",
) -> Figure:
    """A row a setup and a column a precision. `draw` returns the title; a panel without scores says so."""
    setups, precisions = results.setups, results.config.mismatch.precisions
    looks = style.looks(results.config.precisions)
    figure, axes = style.grid(
        len(setups), len(precisions), width=size, height=size, sharex=True, sharey=True if aspect == "equal" else "row"
    )
    for (row, setup), (column, precision) in itertools.product(enumerate(setups), enumerate(precisions)):
        panel, cell = axes[row, column], results.cell(setup, precision)
        if aspect == "equal":
            panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        if cell is None or cell.panels is None or not cell.panels.tokens:
            style.empty(panel, "no scores")
            panel.set_title(looks[precision].label, fontsize=7.5)
        else:
            panel.set_title(draw(panel, cell, looks[precision]), fontsize=7.5)
        if row == len(setups) - 1:
            panel.set_xlabel(across)
        if column == 0:
            panel.set_ylabel(f"{results.setup_label(setup)}\n{up}")
    return figure


def _panel_a_setup(
    results: Results, draw: Callable[[Axes, MismatchCell, Look], None], across: str, up: str, *, height: float
) -> Figure:
    """A panel a setup, its precisions together in it."""
    setups, looks = results.setups, style.looks(results.config.precisions)
    figure, axes = style.grid(1, len(setups), width=2.6, height=height, sharex=True, sharey=True)
    for column, setup in enumerate(setups):
        panel = axes[0, column]
        for cell in cells_of(results, setup):
            draw(panel, cell, looks[cell.precision])
        panel.set_title(results.setup_label(setup))
        panel.set_xlabel(across)
    axes[0, 0].set_ylabel(up)
    style.legend(figure, [looks[name] for name in results.measured_precisions])
    return figure


def cells_of(results: Results, setup: Setup) -> list[MismatchCell]:
    return [cell for cell in results.cells if cell.setup == setup]


def points_up(
    panel: Axes,
    places: Iterable[float],
    values: Iterable[Estimate],
    look: Look,
    *,
    joined: bool = True,
    hollow: bool = False,
) -> None:
    """Values with their intervals over some places."""
    at, value, bars = _known(places, values)
    panel.errorbar(at, value, yerr=bars, **_bars(look, hollow), linestyle=look.line if joined else "none")


def points_across(panel: Axes, values: Iterable[Estimate], places: Iterable[float], look: Look) -> None:
    """As `points_up`, the values along the horizontal axis."""
    at, value, bars = _known(places, values)
    panel.errorbar(value, at, xerr=bars, **_bars(look), linestyle="none")


def _bars(look: Look, hollow: bool = False) -> dict[str, Any]:
    return {
        "marker": look.marker,
        "markerfacecolor": "none" if hollow else look.colour,
        "color": look.colour,
        "elinewidth": 1,
        "capsize": 1.5,
        "linewidth": 1,
        "markersize": 4.5,
    }


def _known(places: Iterable[float], values: Iterable[Estimate]) -> tuple[Floats, Floats, Floats]:
    """Places [n], values [n] and lengths of bars below and above [2, n] of what is known."""
    known = [(place, *value) for place, value in zip(places, values, strict=True) if math.isfinite(value.value)]
    at, value, low, high = np.array(known, dtype=np.float64).reshape(-1, 4).T
    return at, value, np.nan_to_num(np.maximum([value - low, high - value], 0.0))


# -------------------------------------------------------------------------------------------------------------- words
def _interval(results: Results) -> str:
    return f"{percent(results.config.report.confidence)} interval"


def setup_names(results: Results) -> str:
    return ", ".join(results.setup_label(setup) for setup in results.setups) or "no model"


def precision_names(results: Results) -> str:
    return ", ".join(map(style.label, results.config.mismatch.precisions))


def spoken(results: Results, name: str, what: str) -> str:
    """The numbers of a figure as a sentence, for readers who do not see it."""
    numbers = "; ".join(
        f"{results.setup_label(cell.setup)} {style.label(cell.precision)} {with_interval(cell.metric(name))}"
        for cell in results.cells
    )
    return f"{what}: {numbers or 'none'}."


def _spoken_cosines(results: Results) -> str:
    return "; ".join(
        f"{results.setup_label(cell.setup)} {style.label(cell.precision)} {objective} "
        f"{with_interval(cell.cosine(objective))}"
        for cell in results.cells
        for objective in cell.objectives
    )
