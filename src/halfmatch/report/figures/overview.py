"""The headline as a figure, and the problems that training was on."""

from __future__ import annotations

import numpy as np

from halfmatch.report.figures import style
from halfmatch.report.figures.mismatch import points_across
from halfmatch.report.figures.style import Drawing
from halfmatch.report.numbers import percent, with_interval
from halfmatch.report.results import Results

# Neither is a dtype's colour.
_KEPT, _LEFT_OUT = "#8a5a9e", "#a0a0a0"

_METRICS = (
    ("k3", "k3, KL[μ‖π]\n(nats a token)", True),
    ("sigma", "σ of Σd (nats)", True),
    ("ess_share", "ESS / N", False),
    ("usable_length", "usable length T½\n(tokens)", True),
)


def headline(results: Results) -> Drawing:
    """The four numbers of the headline for every setup and precision, with their intervals."""
    setups, looks = results.setups, style.looks(results.config.precisions)
    precisions = results.config.mismatch.precisions
    figure, axes = style.grid(1, len(_METRICS), width=2.0, height=0.6 + 0.45 * len(setups), sharey=True)
    for panel, (name, label, is_logarithmic) in zip(axes[0], _METRICS, strict=True):
        for rank, precision in enumerate(precisions):
            cells = [(row, cell) for row, setup in enumerate(setups) if (cell := results.cell(setup, precision))]
            places = [row + (rank - (len(precisions) - 1) / 2) * 0.2 for row, _ in cells]
            points_across(panel, [cell.metric(name) for _, cell in cells], places, looks[precision])
        if is_logarithmic:
            style.log_x(panel)
        else:
            panel.set_xlim(0, 1.05)
        panel.set_xlabel(label)
        panel.set_yticks(range(len(setups)), [results.setup_label(setup) for setup in setups])
        panel.set_ylim(len(setups) - 0.5, -0.5)
        panel.grid(False, axis="y")
    style.legend(figure, [looks[name] for name in results.measured_precisions], line=False)
    return Drawing(
        "headline",
        "The mismatch in four numbers",
        f"Mean k3, standard deviation of Σd over responses, effective sample size as a share of the responses, and the "
        f"length at which sequence-level importance sampling loses half of its samples, ln 2 / (2 k3). Bars are "
        f"{percent(results.config.report.confidence)} intervals over problems.",
        "Dot plots of k3, sigma, effective sample size and usable length for "
        + "; ".join(
            f"{results.setup_label(cell.setup)} {style.label(cell.precision)} (k3 {with_interval(cell.metric('k3'))})"
            for cell in results.cells
        ),
        figure,
    )


def solve_rates(results: Results) -> Drawing:
    """Problems by the share of tries that the initial model solved, and the band that is kept."""
    if results.perfectible is None:
        raise ValueError("there are no solve rates to draw")
    rates = results.perfectible["solve_rate"].to_numpy()
    kept = results.perfectible["kept"].to_numpy(zero_copy_only=False)
    band = results.config.solvability
    figure, axes = style.grid(1, 1, width=4.6, height=2.0)
    panel, edges = axes[0, 0], np.linspace(0, 1, 21)
    panel.axvspan(band.low, band.high, color=style.GRID, alpha=0.5, linewidth=0, zorder=0)
    panel.hist(
        [rates[kept], rates[~kept]],
        edges,
        stacked=True,
        color=[_KEPT, _LEFT_OUT],
        label=[f"kept ({kept.sum()})", f"left out ({(~kept).sum()})"],
        edgecolor="white",
        linewidth=0.5,
        zorder=2,
    )
    panel.set_xlim(0, 1)
    panel.set_xlabel("share of tries that the initial model solves")
    panel.set_ylabel("problems")
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return Drawing(
        "solve-rates",
        "The perfectible set",
        f"Problems by solve rate, {band.samples} tries each; the shaded band, {percent(band.low)} to "
        f"{percent(band.high)}, is kept for training.",
        f"Histogram of solve rates of {len(rates)} problems, of which {kept.sum()} lie in the band that is kept.",
        figure,
    )
