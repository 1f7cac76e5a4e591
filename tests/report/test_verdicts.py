"""Every rule on intervals made by hand: each of the three outcomes, and what is missing."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest

from halfmatch.artifacts import TABLES
from halfmatch.paths import Run
from halfmatch.report import verdicts
from halfmatch.report.results import EvaluationCell, MismatchCell, Results, Setup
from halfmatch.report.training import TrainingRun
from halfmatch.report.verdicts import (
    NOT_REPRODUCED,
    NOT_TESTABLE,
    REPRODUCED,
    Comparison,
    Verdict,
    above,
    inside,
)
from halfmatch.statistics import Estimate

SETUP = Setup("gain16", "all", "transformers")


@pytest.fixture
def nothing(synthetic, tmp_path):
    """Results without any artefact."""
    return Results(synthetic.config(tmp_path), [], [], [], [], None, {}, [], [])


def cell(precision, cosines=None, setup=SETUP, **metrics):
    def known(value):
        return dict(zip(("value", "low", "high"), value, strict=True))

    return MismatchCell(
        setup,
        precision,
        precision,
        {"metrics": {name: known(value) for name, value in metrics.items()}},
        None,
        {"objectives": {name: {"cosine": known(value)} for name, value in (cosines or {}).items()}},
    )


def with_cells(results, *cells):
    return dataclasses.replace(results, cells=cells)


def outcome_of_pair(results, claim, bf16, fp16):
    return claim(with_cells(results, cell("bf16", **bf16), cell("fp16", **fp16))).outcome


# --------------------------------------------------------------------------------------------------------------- rules
@pytest.mark.parametrize(
    ("estimate", "outcome"),
    [
        (Estimate(30, 21, 40), REPRODUCED),
        (Estimate(30, 20, 40), NOT_TESTABLE),
        (Estimate(30, 15, 40), NOT_TESTABLE),
        (Estimate(15, 10, 19), NOT_REPRODUCED),
        (Estimate(15, 10, 20), NOT_REPRODUCED),
        (Estimate(30, math.nan, math.nan), NOT_TESTABLE),
    ],
)
def test_above(estimate, outcome):
    assert above(estimate, 20) == outcome


@pytest.mark.parametrize(
    ("estimate", "outcome"),
    [
        (Estimate(1, 0.9, 1.1), REPRODUCED),
        (Estimate(1, 0.8, 1.25), REPRODUCED),
        (Estimate(1, 0.7, 1.1), NOT_TESTABLE),
        (Estimate(1, 0.9, 1.3), NOT_TESTABLE),
        (Estimate(0.5, 0.4, 0.79), NOT_REPRODUCED),
        (Estimate(2, 1.26, 3), NOT_REPRODUCED),
        (Estimate(1, math.nan, math.nan), NOT_TESTABLE),
    ],
)
def test_inside(estimate, outcome):
    assert inside(estimate, 0.8, 1.25) == outcome


@pytest.mark.parametrize(
    ("outcomes", "outcome"),
    [
        ([], NOT_TESTABLE),
        ([REPRODUCED], REPRODUCED),
        ([REPRODUCED, REPRODUCED, NOT_TESTABLE], REPRODUCED),
        ([REPRODUCED, NOT_TESTABLE], NOT_TESTABLE),
        ([REPRODUCED, REPRODUCED, REPRODUCED, NOT_REPRODUCED], NOT_REPRODUCED),
        ([NOT_TESTABLE], NOT_TESTABLE),
    ],
)
def test_a_claim_stands_or_falls_with_its_comparisons(outcomes, outcome):
    comparisons = tuple(Comparison("", Estimate(1, 0, 2), one) for one in outcomes)
    verdict = Verdict("key", "claim", "source", "rule", comparisons)
    assert verdict.outcome == outcome
    assert verdict.reason.startswith(f"{outcomes.count(REPRODUCED)} of {len(outcomes)}" if outcomes else "Nothing")


# -------------------------------------------------------------------------------------------------------- the mismatch
@pytest.mark.parametrize(
    ("bf16", "outcome"),
    [
        ((1e-3, 0.9e-3, 1.1e-3), REPRODUCED),  # 50 times
        ((4.2e-4, 3.0e-4, 6.0e-4), NOT_TESTABLE),  # 21 times, give or take
        ((1e-4, 0.9e-4, 1.1e-4), NOT_REPRODUCED),  # 5 times
    ],
)
def test_k3_ratio(nothing, bf16, outcome):
    assert outcome_of_pair(nothing, verdicts.k3_ratio, {"k3": bf16}, {"k3": (2e-5, 1.9e-5, 2.1e-5)}) == outcome


def test_k3_ratio_is_bf16_over_fp16(nothing):
    cells = (cell("bf16", k3=(1e-3, 0.9e-3, 1.1e-3)), cell("fp16", k3=(2e-5, 1.9e-5, 2.1e-5)))
    (comparison,) = verdicts.k3_ratio(with_cells(nothing, *cells)).comparisons
    assert comparison.estimate.value == pytest.approx(50)


@pytest.mark.parametrize(
    ("sigma", "outcome"),
    [((0.41, 0.38, 0.44), REPRODUCED), ((0.41, 0.30, 0.52), NOT_TESTABLE), ((0.60, 0.55, 0.65), NOT_REPRODUCED)],
)
def test_sigma_law(nothing, sigma, outcome):
    metrics = {"sigma": sigma, "sigma_predicted": (0.41, 0.40, 0.42)}
    assert outcome_of_pair(nothing, verdicts.sigma_law, metrics, metrics) == outcome


@pytest.mark.parametrize(
    ("bf16", "outcome"),
    [((0.85, 0.80, 0.90), REPRODUCED), ((0.96, 0.92, 0.999), NOT_TESTABLE), ((0.999, 0.998, 0.9995), NOT_REPRODUCED)],
)
def test_effective_sample_size(nothing, bf16, outcome):
    fp16 = {"ess_share": (0.98, 0.97, 0.985)}
    assert outcome_of_pair(nothing, verdicts.effective_sample_size, {"ess_share": bf16}, fp16) == outcome


@pytest.mark.parametrize(
    ("bf16", "outcome"),
    [((-1.0, -1.3, -0.7), REPRODUCED), ((-0.1, -1.0, 0.8), NOT_TESTABLE), ((0.9, 0.6, 1.2), NOT_REPRODUCED)],
)
def test_slope(nothing, bf16, outcome):
    fp16 = {"slope_per_1k": (-0.07, -0.1, -0.04)}
    assert outcome_of_pair(nothing, verdicts.slope, {"slope_per_1k": bf16}, fp16) == outcome


def test_gradient_fidelity_compares_objective_by_objective(nothing):
    bf16 = cell("bf16", {"pg": (0.9, 0.85, 0.95), "grpo": (0.97, 0.9, 1.0), "gspo": (0.5, 0.4, 0.6)})
    fp16 = cell("fp16", {"pg": (0.99, 0.98, 1.0), "grpo": (0.98, 0.96, 1.0)})
    verdict = verdicts.gradient_fidelity(with_cells(nothing, bf16, fp16))
    assert [(one.what, one.outcome) for one in verdict.comparisons] == [
        ("gain16, pg", REPRODUCED),
        ("gain16, grpo", NOT_TESTABLE),
    ]


def test_setups_are_compared_within_themselves(nothing):
    other = Setup("gain120", "all", "transformers")
    cells = [
        cell("bf16", k3=(1e-3, 0.9e-3, 1.1e-3)),
        cell("fp16", k3=(2e-5, 1.9e-5, 2.1e-5)),
        cell("bf16", k3=(1e-1, 0.9e-1, 1.1e-1), setup=other),
    ]
    assert [one.what for one in verdicts.k3_ratio(with_cells(nothing, *cells)).comparisons] == ["gain16"]


# --------------------------------------------------------------------------------------------------- untrained scores
def evaluation(precision, correct, samples=100, timeout=0, run="initial"):
    rows = [
        {
            "problem_id": f"p{number}",
            "samples": samples,
            "correct": count,
            "wrong": samples - count - timeout,
            "truncated": 0,
            "timeout": timeout,
            "unparseable": 0,
            "wrong_votes": [],
            "mean_tokens": 1.0,
        }
        for number, count in enumerate(correct)
    ]
    return EvaluationCell(
        run, "heldout", "transformers", precision, {}, pa.Table.from_pylist(rows, TABLES["evaluation"].schema)
    )


@pytest.mark.parametrize(
    ("fp16", "outcome"),
    [
        ([51, 49, 50, 52, 48], REPRODUCED),
        ([60, 40, 55, 45, 50], NOT_TESTABLE),
        ([70, 71, 69, 70, 72], NOT_REPRODUCED),
    ],
)
def test_untrained_scores(nothing, fp16, outcome):
    results = dataclasses.replace(nothing, evaluations=[evaluation("bf16", [50] * 5), evaluation("fp16", fp16)])
    verdict = verdicts.untrained_scores(results)
    assert verdict.outcome == outcome
    assert verdict.comparisons[0].estimate.value == pytest.approx((np.mean(fp16) - 50) / 100)


@pytest.mark.parametrize(("correct", "note"), [(0, "0 % correct in both"), (100, "100 % correct in both")])
def test_a_benchmark_that_is_all_failed_or_all_solved_says_nothing(nothing, correct, note):
    cells = [evaluation("bf16", [correct] * 5), evaluation("fp16", [correct] * 5)]
    (comparison,) = verdicts.untrained_scores(dataclasses.replace(nothing, evaluations=cells)).comparisons
    assert (comparison.outcome, comparison.note) == (NOT_TESTABLE, note)


def test_samples_that_the_grader_timed_out_on_are_no_tries(nothing):
    cells = [evaluation("bf16", [50] * 5), evaluation("fp16", [25] * 5, timeout=50)]
    verdict = verdicts.untrained_scores(dataclasses.replace(nothing, evaluations=cells))
    assert verdict.comparisons[0].estimate.value == pytest.approx(0)


def test_trained_weights_are_no_part_of_the_untrained_comparison(nothing):
    cells = [evaluation("bf16", [50] * 5), evaluation("fp16", [90] * 5, run="fp16_grpo_seed0")]
    assert verdicts.untrained_scores(dataclasses.replace(nothing, evaluations=cells)).comparisons == ()


# ----------------------------------------------------------------------------------------------------------- training
def run(precision, seed, reward, *, iterations=60, objective="grpo", collapsed=False):
    events = [(7, "collapse of the reward: it fell")] if collapsed else []
    series = {"reward": np.broadcast_to(np.asarray(reward, float), iterations).copy()}
    return TrainingRun(Run(precision, objective, seed), iterations, iterations, series, events)


def trained(results, bf16, fp16, **settings):
    runs = [
        run(precision, seed, reward, **settings)
        for precision, rewards in (("bf16", bf16), ("fp16", fp16))
        for seed, reward in enumerate(rewards)
    ]
    return dataclasses.replace(results, runs=runs)


@pytest.mark.parametrize("claim", [verdicts.trains_higher, verdicts.trains_sooner])
@pytest.mark.parametrize(
    ("bf16", "fp16", "outcome"),
    [
        ([0.70, 0.72, 0.71], [0.80, 0.81, 0.82], REPRODUCED),
        ([0.70, 0.90, 0.80], [0.80, 0.81, 0.82], NOT_TESTABLE),
        ([0.80, 0.81, 0.82], [0.70, 0.72, 0.71], NOT_REPRODUCED),
    ],
)
def test_training(nothing, claim, bf16, fp16, outcome):
    assert claim(trained(nothing, bf16, fp16)).outcome == outcome


@pytest.mark.parametrize("claim", [verdicts.trains_higher, verdicts.trains_sooner, verdicts.sanity_test])
def test_two_seeds_decide_nothing(nothing, claim):
    (comparison,) = claim(trained(nothing, [0.50, 0.51], [0.99, 0.98])).comparisons
    assert comparison.outcome == NOT_TESTABLE
    assert "2 seeds, 3 are needed" in comparison.note


def test_higher_looks_at_the_end_and_sooner_at_the_whole(nothing):
    early = [np.concatenate([np.full(30, 0.9), np.full(30, 0.9 + noise)]) for noise in (0.0, 0.01, -0.01)]
    late = [np.concatenate([np.full(30, 0.5), np.full(30, 0.9 - noise)]) for noise in (0.0, 0.01, -0.01)]
    results = trained(nothing, late, early)
    assert verdicts.trains_sooner(results).outcome == REPRODUCED
    assert verdicts.trains_higher(results).outcome == NOT_TESTABLE


def test_only_seeds_that_both_have_are_compared(nothing):
    results = trained(nothing, [0.5, 0.5, 0.5], [0.9, 0.9, 0.9])
    results = dataclasses.replace(results, runs=[*results.runs[:3], *results.runs[4:], run("fp16", 7, 0.1)])
    (comparison,) = verdicts.trains_higher(results).comparisons
    assert comparison.estimate.value == pytest.approx(0.4)
    assert "2 seeds" in comparison.note


@pytest.mark.parametrize(
    ("bf16", "fp16", "outcome"),
    [
        ((True, True, True), (False, False, False), REPRODUCED),
        ((True, False, False), (False, False, False), NOT_TESTABLE),
        ((False, False, False), (False, False, False), NOT_TESTABLE),
        ((False, False, False), (True, True, True), NOT_REPRODUCED),
        ((True, True), (False, False), NOT_TESTABLE),
    ],
)
def test_collapse(nothing, bf16, fp16, outcome):
    runs = [
        run(precision, seed, 0.5, collapsed=collapsed)
        for precision, seeds in (("bf16", bf16), ("fp16", fp16))
        for seed, collapsed in enumerate(seeds)
    ]
    verdict = verdicts.collapse(dataclasses.replace(nothing, runs=runs))
    assert verdict.outcome == outcome
    assert f"{sum(bf16)} of {len(bf16)} in BF16" in verdict.comparisons[0].note


@pytest.mark.parametrize(
    ("fp16", "iterations", "outcome"),
    [
        ([0.97, 0.98, 0.975], 60, REPRODUCED),
        ([0.93, 0.98, 0.95], 60, NOT_TESTABLE),
        ([0.80, 0.81, 0.82], 60, NOT_TESTABLE),  # so far; the paper's runs are longer
        ([0.80, 0.81, 0.82], 2000, NOT_REPRODUCED),
    ],
)
def test_sanity_test(nothing, fp16, iterations, outcome):
    results = trained(nothing, [0.5] * 3, fp16, iterations=iterations)
    assert verdicts.sanity_test(results).outcome == outcome


# ---------------------------------------------------------------------------------------------------------------- all
def test_without_artefacts_nothing_is_claimed(nothing):
    judged = verdicts.judge(nothing)
    assert len(judged) == len(verdicts.CLAIMS)
    assert {verdict.outcome for verdict in judged} == {NOT_TESTABLE}
    assert len({verdict.key for verdict in judged}) == len(judged)


def test_noise_that_follows_the_law_is_judged_so(results):
    outcomes = {verdict.key: verdict.outcome for verdict in verdicts.judge(results)}
    assert {outcomes[key] for key in ("k3-ratio", "ess", "gradient", "training-higher", "training-sooner")} == {
        REPRODUCED
    }
    assert outcomes["sigma-law"] != NOT_REPRODUCED
    assert outcomes["collapse"] == NOT_TESTABLE
