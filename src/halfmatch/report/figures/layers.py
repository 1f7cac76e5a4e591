"""Where the mismatch arises: errors by layer and operation, and what goes away with a part in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from halfmatch.report.figures import style
from halfmatch.report.figures.mismatch import points_across
from halfmatch.report.figures.style import Drawing, Look
from halfmatch.report.numbers import in_percent, percent, with_interval
from halfmatch.report.results import OriginCell, Results, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What is behind a layer or at the end: the places that every later one builds on.
_STREAM = ("residual", "norm", "lm_head")
_OPERATIONS = {"norm": "norms", "attention": "attention", "mlp": "MLPs", "lm_head": "LM head"}
_PARTS = {**_OPERATIONS, "norm": "norms", "between_matmuls": "all but the\ninputs of matmuls"}


def error_origin(results: Results) -> Drawing:
    """Three panels a setup: the residual stream, operations by themselves, the KL that parts in fp32 take away."""
    setups = list(dict.fromkeys(cell.setup for cell in results.origins))
    looks = style.looks(results.config.precisions)
    figure, axes = style.grid(len(setups), 3, width=2.7, height=2.1)
    for row, setup in enumerate(setups):
        cells = [cell for cell in results.origins if cell.setup == setup]
        for rank, cell in enumerate(cells):
            aside = (rank - (len(cells) - 1) / 2) * min(0.2, 0.8 / len(cells))
            _along_the_layers(axes[row, 0], cell, looks[cell.precision])
            _by_operation(axes[row, 1], cell, looks[cell.precision], aside)
            _by_part(axes[row, 2], cell, looks[cell.precision], aside)
        style.log_y(axes[row, :1])
        style.log_x(axes[row, 1])
        axes[row, 0].set_ylabel(f"{results.setup_label(setup)}\nrelative error")
        _name_rows(axes[row, 1], list(_OPERATIONS.values()))
        parts = list(dict.fromkeys(part["part"] for cell in cells for part in cell.content["parts"]))
        _name_rows(axes[row, 2], [_PARTS.get(part, part) for part in parts])
        axes[row, 2].axvline(1, color=style.INK, linewidth=0.5, zorder=1)
        axes[row, 2].axvline(0, color=style.INK, linewidth=0.5, zorder=1)
    for panel, title in zip(
        axes[0], ("behind each layer", "of an operation alone", "with a part in fp32"), strict=True
    ):
        panel.set_title(title)
    for panel, label in zip(
        axes[-1], ("layer, last norm, LM head", "relative error", "share of the KL that goes away"), strict=True
    ):
        panel.set_xlabel(label)
    style.legend(figure, [looks[name] for name in dict.fromkeys(cell.precision for cell in results.origins)])
    return Drawing(
        "error-origin",
        "Errors by layer and operation",
        "Left: the states behind each layer against a float64 pass of the same, rounded, weights, root mean square "
        "over positions (full points: trainer; hollow: engine), and the difference of the two sides (thin line). "
        "Middle: the error that an operation adds to the states that it is given, mean over layers. Right: how much of "
        "the KL goes away when both sides are computed again with a part in fp32; parts do not add up. Bars are "
        f"{percent(results.config.report.confidence)} intervals over problems.",
        "Errors of hidden states by layer, of operations alone, and the share of the KL that goes away with parts in "
        "fp32. "
        + " ".join(
            f"{results.setup_label(cell.setup)} {style.label(cell.precision)}: "
            + ", ".join(
                f"{_PARTS.get(part['part'], part['part'])} {with_interval(in_percent(estimate(part['removed'])), 2)} %"
                for part in cell.content["parts"]
            ).replace("\n", " ")
            + f", of a KL of {with_interval(estimate(cell.content['kl']))}."
            for cell in results.origins
        ),
        figure,
    )


def _along_the_layers(panel: Axes, cell: OriginCell, look: Look) -> None:
    rows = [one for one in cell.content["operations"] if one["operation"] == "residual" or one["layer"] is None]
    places = np.arange(len(rows))
    for name, hollow in (("trainer", False), ("engine", True)):
        values = [_known(one[name]["value"]) for one in rows]
        panel.plot(
            places,
            values,
            color=look.colour,
            marker=look.marker,
            markersize=3.5,
            linestyle=look.line if not hollow else "none",
            linewidth=1,
            markerfacecolor="none" if hollow else look.colour,
        )
    panel.plot(places, [_known(one["difference"]["value"]) for one in rows], color=look.colour, linewidth=0.5)
    ticks = [str(one["layer"] + 1) if one["layer"] is not None else one["operation"] for one in rows]
    shown = [place for place in places if rows[place]["layer"] is None or place % max(1, len(rows) // 8) == 0]
    panel.set_xticks(shown, [ticks[place].replace("lm_", "") for place in shown])


def _known(value: float | None) -> float:
    """What a logarithmic axis can show."""
    return value if value is not None and value > 0 else math.nan


def _by_operation(panel: Axes, cell: OriginCell, look: Look, aside: float) -> None:
    for name, hollow in (("trainer_own", False), ("engine_own", True)):
        for place, operation in enumerate(_OPERATIONS):
            values = [
                one[name]["value"]
                for one in cell.content["operations"]
                if one["operation"] == operation and one[name]["value"]
            ]
            if values:
                panel.plot(
                    float(np.mean(values)),
                    place + aside,
                    color=look.colour,
                    marker=look.marker,
                    markersize=4.5,
                    linestyle="none",
                    markerfacecolor="none" if hollow else look.colour,
                )


def _by_part(panel: Axes, cell: OriginCell, look: Look, aside: float) -> None:
    parts = cell.content["parts"]
    points_across(
        panel, [estimate(part["removed"]) for part in parts], [place + aside for place in range(len(parts))], look
    )


def _name_rows(panel: Axes, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.grid(False, axis="y")
