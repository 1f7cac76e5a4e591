"""Where the σ law holds and fails, on noise that follows it and on numbers made to break it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from halfmatch.report import sigma_law
from halfmatch.report.figures import sigma_law as figure
from halfmatch.report.figures import style
from halfmatch.statistics import Estimate, t_interval


def changed(results, precision="bf16", **metrics):
    """The same results, with other estimates of whole responses of gain120 in one precision."""
    cells = []
    for cell in results.cells:
        if (cell.setup.model, cell.precision) == ("gain120", precision):
            values = {name: dict(zip(("value", "low", "high"), value, strict=True)) for name, value in metrics.items()}
            cell = dataclasses.replace(
                cell, analysis={**cell.analysis, "lengths": [], "metrics": {**cell.analysis["metrics"], **values}}
            )
        cells.append(cell)
    return dataclasses.replace(results, cells=cells, runs=[])


def whole(results, precision="bf16"):
    (one,) = (
        one
        for one in sigma_law.lengths(results)
        if one.is_whole and (one.cell.setup.model, one.cell.precision) == ("gain120", precision)
    )
    return one


def test_every_length_of_every_measurement_is_there_and_whole_responses_last(results):
    rows = sigma_law.lengths(results)
    assert [(one.length, one.is_whole) for one in rows[:3]] == [(16, False), (32, False), (64, False)]
    assert sum(one.is_whole for one in rows) == len(results.cells) == 4
    for one in rows:
        assert one.kl_law.value == pytest.approx(one.sigma_law.value**2 / 2)
        assert one.tails.value == pytest.approx(1, abs=0.05)  # normal noise
        assert one.bounds[0] <= one.tails.value <= one.bounds[1]
    assert whole(results).sigma == results.cells[2].metric("sigma")


@pytest.mark.parametrize(
    ("sigma", "outcome"),
    [((1.0, 0.9, 1.1), True), ((1.3, 1.2, 1.4), None), ((2.0, 1.8, 2.2), False), ((0.5, 0.4, 0.6), False)],
)
def test_the_law_holds_fails_or_cannot_be_told(results, sigma, outcome):
    one = whole(changed(results, sigma=sigma, sigma_predicted=(1.0, 1.0, 1.0)))
    assert one.outcome is outcome


def test_what_is_proved_is_that_sigma_is_within_the_slack_of_the_tokens(results):
    given = {"sigma_predicted": (2.0, 2.0, 2.0), "sigma_tokens": (2.2, 2.2, 2.2), "sigma_slack": (0.6, 0.6, 0.6)}
    assert whole(changed(results, **given)).bounds == pytest.approx((0.8, 1.4))


def test_the_statement_names_what_fails_and_its_cause(results):
    given = {"sigma_predicted": (1.0, 0.98, 1.02), "sigma_tokens": (1.5, 1.5, 1.5)}
    text = sigma_law.statement(changed(results, sigma=(3.0, 2.8, 3.2), **given))
    assert "It fails for gain120 in BF16, whole responses: σ is 3.00 [2.79, 3.21] times the law's" in text
    assert "the tails of single tokens give 1.5 [1.5, 1.5]" in text
    assert "It fails for" not in sigma_law.statement(changed(results, sigma=(1.0, 0.95, 1.05), **given))


def test_the_statement_says_where_an_ess_is_not_to_be_believed(results):
    few = changed(results, ess_share=(0.1, 0.05, 0.2), ess_share_predicted=(0.01, 0.009, 0.011))
    assert "It fails where fewer are left (1)" in sigma_law.statement(few)
    assert "up to 10 [5.0, 20] times the law's" in sigma_law.statement(few)


def test_without_measurements_nothing_is_said_of_the_law(results):
    text = sigma_law.statement(dataclasses.replace(results, cells=[], runs=[]))
    assert text == "Too little has been measured to say where the law holds."


def test_in_training_the_ratio_is_a_mean_over_iterations_and_runs(results):
    runs = results.training_runs("bf16", "grpo")
    law = sigma_law.training_law(runs[0])
    assert law["over"] == pytest.approx(np.ones(60))  # the artefacts' σ is √(2·k3·62), at 62 tokens
    assert law["ess_share"] == pytest.approx(runs[0].series["ess_share"])
    series = {**runs[0].series, "sigma": runs[0].series["sigma"] * np.exp(np.tile([0.1, 0.3], 30))}
    moved = dataclasses.replace(runs[0], series=series)
    found = sigma_law.in_training([moved], slice(0, 10), 0.95)
    low, high = t_interval([0.1, 0.3] * 5, 0.95)
    assert found == pytest.approx((math.exp(0.2), math.exp(low), math.exp(high)))
    assert math.isnan(sigma_law.in_training([], slice(0, 10), 0.95).value)
    assert "While BF16 trains, σ over the law is 1.00 [1.00, 1.00]" in sigma_law.statement(results)


def test_the_table_has_every_number_with_its_interval(results):
    table = sigma_law.table(results)
    assert len(table.rows) == len(sigma_law.lengths(results))
    for row in (dict(zip(table.header, row, strict=True)) for row in table.rows):
        for name in ("σ seen", "σ by the law", "seen / law", "KL seen (nats)", "kT", "ESS/N seen", "exp(−2kT)"):
            assert "[" in row[name]
        assert ("[" in row["σ by the long-run variance"]) == row["length (tokens)"].endswith("whole")


def test_long_batches_that_no_response_fills_are_passed_over(results):
    rows = [{"batches": 9, "sigma_predicted": {"value": 1.0, "low": 0.5, "high": 2.0}}]
    rows += [{"batches": 0, "sigma_predicted": {"value": None, "low": None, "high": None}}]
    cell = dataclasses.replace(results.cells[0], analysis={**results.cells[0].analysis, "batch_means": rows})
    assert sigma_law.long_run(cell) == Estimate(1.0, 0.5, 2.0)


def test_without_training_the_figure_has_lengths_alone(results):
    with style.styled():
        offline = figure.draw(dataclasses.replace(results, runs=[]))
        both = figure.draw(results)
    assert len(offline.figure.axes) == len(figure.OFFLINE) * 2
    assert len(both.figure.axes) == (len(figure.OFFLINE) + len(figure.TRAINING)) * 2
