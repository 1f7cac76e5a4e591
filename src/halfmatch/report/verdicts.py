"""The paper's claims, judged by intervals: reproduced, not reproduced, or not testable at this scale.

Every comparison is an estimate with an interval and a rule that is fixed beforehand. A claim is decided by all of its
comparisons: one that goes against it is enough to say no, and more than half have to go its way to say yes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from halfmatch import jobs, paper
from halfmatch.report import deployment
from halfmatch.report.deployment import Deployment
from halfmatch.report.figures.style import label
from halfmatch.report.numbers import counted, percent
from halfmatch.report.results import EvaluationCell, MismatchCell, Results
from halfmatch.report.sigma_law import MARGIN
from halfmatch.report.training import WINDOW, TrainingRun
from halfmatch.statistics import Estimate, difference, paired_test, ratio, t_interval, wilson_interval

Outcome = Literal["reproduced", "not reproduced", "not testable at this scale"]
REPRODUCED: Outcome = "reproduced"
NOT_REPRODUCED: Outcome = "not reproduced"
NOT_TESTABLE: Outcome = "not testable at this scale"

FACTOR = 20.0  # the paper's offline KL differs by 23.9, its online KL a token by 67 and more
SCORE_MARGIN = 0.05  # of avg@k; the paper's own untrained scores differ by up to 0.025 between BF16 and FP16
MIN_SEEDS = 3
PAPER_STEPS = 2000  # at which the paper's FP16 runs are past 95 %


@dataclass(frozen=True)
class Comparison:
    """One number that bears on a claim."""

    what: str
    estimate: Estimate
    outcome: Outcome
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """A claim, the rule that it is judged by, the numbers, and what follows from them."""

    key: str
    claim: str
    source: str
    rule: str
    comparisons: tuple[Comparison, ...]

    @property
    def outcome(self) -> Outcome:
        outcomes = [comparison.outcome for comparison in self.comparisons]
        if NOT_REPRODUCED in outcomes:
            return NOT_REPRODUCED
        return REPRODUCED if outcomes.count(REPRODUCED) > len(outcomes) / 2 else NOT_TESTABLE

    @property
    def reason(self) -> str:
        """The outcome in numbers."""
        total = len(self.comparisons)
        if not total:
            return "Nothing that bears on it has been measured here."
        counts = {outcome: sum(one.outcome == outcome for one in self.comparisons) for outcome in ORDER}
        parts = [
            f"{counts[REPRODUCED]} of {total} comparisons agree",
            f"{counts[NOT_REPRODUCED]} go against it" if counts[NOT_REPRODUCED] else "",
            f"{counts[NOT_TESTABLE]} cannot be decided" if counts[NOT_TESTABLE] else "",
        ]
        return f"{', '.join(filter(None, parts))}."


ORDER = (REPRODUCED, NOT_REPRODUCED, NOT_TESTABLE)


def above(estimate: Estimate, bound: float) -> Outcome:
    """Reproduced where the whole interval lies above the bound, not reproduced where none of it does."""
    if estimate.low > bound:
        return REPRODUCED
    return NOT_REPRODUCED if estimate.high <= bound else NOT_TESTABLE


def inside(estimate: Estimate, low: float, high: float) -> Outcome:
    """Reproduced where the whole interval lies in [low, high], not reproduced where none of it does."""
    if estimate.low >= low and estimate.high <= high:
        return REPRODUCED
    return NOT_REPRODUCED if estimate.high < low or estimate.low > high else NOT_TESTABLE


def judge(results: Results) -> list[Verdict]:
    """All claims."""
    return [claim(results) for claim in CLAIMS]


# -------------------------------------------------------------------------------------------- the mismatch, measured
def k3_ratio(results: Results) -> Verdict:
    return Verdict(
        "k3-ratio",
        f"The mismatch a token is at least {FACTOR:.0f} times larger in BF16 than in FP16.",
        "paper [F]: offline KL[μ‖π] 7.64 against 0.32 nats a response, online KL 1e-3 against 1.5e-5 nats a token",
        f"k3 in BF16 over k3 in FP16, for each model: the interval lies above {FACTOR:.0f}",
        tuple(
            Comparison(what, one := ratio(bf16.metric("k3"), fp16.metric("k3")), above(one, FACTOR))
            for what, bf16, fp16 in _measured(results)
        ),
    )


def sigma_law(results: Results) -> Verdict:
    comparisons = []
    for what, *cells in _measured(results):
        for cell in cells:
            seen_over_law = ratio(cell.metric("sigma"), cell.metric("sigma_predicted"))
            outcome = inside(seen_over_law, 1 / MARGIN, MARGIN)
            comparisons.append(Comparison(f"{what}, {label(cell.precision)}", seen_over_law, outcome))
    return Verdict(
        "sigma-law",
        "The σ law: over T tokens with a KL of k a token, Σd has the standard deviation √(2kT).",
        "this project's, not the paper's",
        f"σ seen over σ predicted from k3, whole responses, BF16 and FP16, for each model: the interval lies within "
        f"{1 / MARGIN:.2f} to {MARGIN:.2f}",
        tuple(comparisons),
    )


def _higher_in_fp16(results: Results, metric: str) -> tuple[Comparison, ...]:
    """A metric in FP16 minus that in BF16, for each model."""
    return tuple(
        Comparison(what, one := difference(fp16.metric(metric), bf16.metric(metric)), above(one, 0))
        for what, bf16, fp16 in _measured(results)
    )


def effective_sample_size(results: Results) -> Verdict:
    return Verdict(
        "ess",
        "A correction of whole responses can use more of the samples in FP16 than in BF16.",
        "what the paper's argument rests on; no number of its own",
        "ESS/N in FP16 minus ESS/N in BF16, for each model: the interval lies above 0",
        _higher_in_fp16(results, "ess_share"),
    )


def slope(results: Results) -> Verdict:
    return Verdict(
        "slope",
        "The log-ratio of a response falls with its length, in BF16 faster than in FP16.",
        "paper [F]: −1.01 against −0.07 nats per 1,000 tokens",
        "slope in FP16 minus slope in BF16, for each model: the interval lies above 0",
        _higher_in_fp16(results, "slope_per_1k"),
    )


def gradient_fidelity(results: Results) -> Verdict:
    return Verdict(
        "gradient",
        "FP16's gradients are closer to the exact ones than BF16's.",
        "what the paper's argument rests on; no number of its own",
        "cosine with the exact gradient in FP16 minus that in BF16, for each model and objective: the interval lies "
        "above 0",
        tuple(
            Comparison(
                f"{what}, {objective}",
                one := difference(fp16.cosine(objective), bf16.cosine(objective)),
                above(one, 0),
            )
            for what, bf16, fp16 in _measured(results)
            for objective in fp16.objectives
            if objective in bf16.objectives
        ),
    )


def _measured(results: Results) -> Iterable[tuple[str, MismatchCell, MismatchCell]]:
    """The setups that were measured in BF16 and in FP16."""
    for setup in results.setups:
        bf16, fp16 = results.cell(setup, "bf16"), results.cell(setup, "fp16")
        if bf16 and fp16:
            yield results.setup_label(setup), bf16, fp16


# --------------------------------------------------------------------------------------------------- untrained scores
def untrained_scores(results: Results) -> Verdict:
    margin = f"{100 * SCORE_MARGIN:.0f} percentage points"
    return Verdict(
        "untrained",
        "Precision alone does not change the score of the untrained model.",
        "paper [T]: AMC23 at 32K tokens 62.35 (BF16), 63.10 (FP16), 62.42 (FP32)",
        f"avg@k in FP16 minus avg@k in BF16, problem by problem, for each benchmark: the interval lies within {margin} "
        "either way; a benchmark that is all solved or all failed says nothing",
        tuple(_untrained_comparisons(results)),
    )


def _untrained_comparisons(results: Results) -> Iterable[Comparison]:
    by_place = {
        (cell.problems, cell.engine, cell.precision): cell for cell in results.evaluations if cell.run == jobs.INITIAL
    }
    for (problems, engine, precision), bf16 in by_place.items():
        fp16 = by_place.get((problems, engine, "fp16"))
        if precision != "bf16" or not fp16:
            continue
        shares, others = (_solve_shares(cell) for cell in (fp16, bf16))
        pairs = np.array([(shares[name], others[name]) for name in sorted(shares.keys() & others.keys())])
        if not len(pairs):
            continue
        gaps = pairs[:, 0] - pairs[:, 1]
        gap = Estimate(float(gaps.mean()), *t_interval(gaps, results.config.report.confidence))
        outcome, note = inside(gap, -SCORE_MARGIN, SCORE_MARGIN), ""
        if pairs.min() == pairs.max() and pairs.min() in (0, 1):
            outcome, note = NOT_TESTABLE, f"{percent(pairs.min())} correct in both"
        yield Comparison(f"{problems}, {engine}", gap, outcome, note)


def _solve_shares(cell: EvaluationCell) -> dict[str, float]:
    """Share of correct samples of each problem; those that the grader timed out on are no tries."""
    rows = cell.counts.to_pylist() if cell.counts else []
    tries = {row["problem_id"]: row["samples"] - row["timeout"] for row in rows}
    return {row["problem_id"]: row["correct"] / n for row in rows if (n := tries[row["problem_id"]])}


# --------------------------------------------------------------------------------------------------- the deployment gap
def deployment_gap(results: Results) -> Verdict:
    gaps = {
        (one.benchmark, one.engine, one.precision): one
        for one in deployment.by_precision(results)
        if one.trained_in == one.precision
    }
    comparisons = []
    for (benchmark, engine, precision), bf16 in gaps.items():
        fp16 = gaps.get((benchmark, engine, "fp16"))
        if precision == "bf16" and fp16:
            less = difference(fp16.gap.difference, bf16.gap.difference)
            note = f"verdicts changed: {_changed(bf16)} in BF16, {_changed(fp16)} in FP16"
            comparisons.append(Comparison(f"{benchmark}, {engine}", less, above(less, 0), note))
    return Verdict(
        "deployment-gap",
        "A model trained in BF16 loses more of its accuracy when it is deployed than one trained in FP16.",
        "the paper's deployment gap: the policy that is deployed is not the one that was optimised; no number of its "
        "own",
        "avg@k deployed minus avg@k in the trainer, each in the precision of its training, FP16's minus BF16's, for "
        "each benchmark and engine: the interval lies above 0",
        tuple(comparisons),
    )


def _changed(one: Deployment) -> str:
    return f"{one.gap.gained + one.gap.lost:,} of {one.gap.pairs:,}"


# ----------------------------------------------------------------------------------------------------------- training
def trains_higher(results: Results) -> Verdict:
    return Verdict(
        "training-higher",
        "Training in FP16 ends at a higher accuracy than in BF16.",
        "paper [F]: e.g. GRPO 0.98 against 0.84 at best, PG-Seq-IS 0.98 against 0.79",
        f"mean reward of the last {WINDOW} iterations in FP16 minus that in BF16, seed by seed, for each "
        f"objective: the interval lies above 0, with {MIN_SEEDS} seeds or more",
        tuple(_paired(results, lambda run: run.final_reward)),
    )


def trains_sooner(results: Results) -> Verdict:
    return Verdict(
        "training-sooner",
        "Training in FP16 converges sooner than in BF16.",
        "paper [F]: its curves",
        "mean reward over all iterations in FP16 minus that in BF16, seed by seed, for each objective: the "
        f"interval lies above 0, with {MIN_SEEDS} seeds or more",
        tuple(_paired(results, lambda run: run.mean_reward)),
    )


def _paired(results: Results, quantity: Callable[[TrainingRun], float]) -> Iterable[Comparison]:
    for objective, bf16, fp16 in _trained(results):
        seeds = sorted({run.name.seed for run in bf16} & {run.name.seed for run in fp16})
        pairs = [[quantity(run) for run in runs if run.name.seed in seeds] for runs in (fp16, bf16)]
        test = paired_test(pairs[0], pairs[1], results.config.report.confidence)
        number = counted(len(seeds), "seed")
        if len(seeds) < MIN_SEEDS:
            yield Comparison(objective, test.difference, NOT_TESTABLE, f"{number}, {MIN_SEEDS} are needed")
        else:
            note = f"{number}; exact permutation test p = {test.p_sign_flip:.2g}"
            yield Comparison(objective, test.difference, above(test.difference, 0), note)


def collapse(results: Results) -> Verdict:
    comparisons = []
    for objective, bf16, fp16 in _trained(results):
        shares = [_collapsed(runs, results.config.report.confidence) for runs in (bf16, fp16)]
        counts = " and ".join(
            f"{sum(run.collapsed for run in runs)} of {len(runs)} in {name}"
            for name, runs in (("BF16", bf16), ("FP16", fp16))
        )
        more = difference(*shares)
        enough = min(len(bf16), len(fp16)) >= MIN_SEEDS
        note = f"{counts}, over {max(run.iterations for run in [*bf16, *fp16])} iterations"
        comparisons.append(Comparison(objective, more, above(more, 0) if enough else NOT_TESTABLE, note))
    return Verdict(
        "collapse",
        "Training in BF16 collapses where training in FP16 does not.",
        "paper [F]: GRPO in BF16 by step 600, GSPO after about 1,200; no FP16 run",
        "share of runs that a monitor calls collapsed, BF16 minus FP16 (Wilson's intervals, Newcombe's "
        f"difference), for each objective: the interval lies above 0, with {MIN_SEEDS} seeds or more",
        tuple(comparisons),
    )


def _collapsed(runs: Sequence[TrainingRun], confidence: float) -> Estimate:
    count = sum(run.collapsed for run in runs)
    return Estimate(count / len(runs), *wilson_interval(count, len(runs), confidence))


def sanity_test(results: Results) -> Verdict:
    comparisons = []
    for objective, _, fp16 in _trained(results):
        best = [run.best_reward for run in fp16]
        reached = Estimate(float(np.mean(best)), *t_interval(best, results.config.report.confidence))
        outcome, note = above(reached, paper.SANITY_ACCURACY), counted(len(best), "seed")
        if len(best) < MIN_SEEDS:
            outcome, note = NOT_TESTABLE, f"{note}, {MIN_SEEDS} are needed"
        elif outcome == NOT_REPRODUCED and max(run.iterations for run in fp16) < PAPER_STEPS:
            outcome = NOT_TESTABLE
            note = (
                f"{note}; {max(run.iterations for run in fp16)} iterations, where the paper's runs take {PAPER_STEPS:,}"
            )
        comparisons.append(Comparison(objective, reached, outcome, note))
    return Verdict(
        "sanity",
        f"FP16 passes the sanity test: training accuracy above {percent(paper.SANITY_ACCURACY)}.",
        "paper [T] for the rule, [F] for the outcome: every FP16 run passes, no BF16 run does",
        f"best mean reward over {WINDOW} iterations in FP16, mean over seeds, for each objective: the interval "
        f"lies above {paper.SANITY_ACCURACY}, with {MIN_SEEDS} seeds or more; below it after fewer than "
        f"{PAPER_STEPS:,} iterations says nothing",
        tuple(comparisons),
    )


def _trained(results: Results) -> Iterable[tuple[str, list[TrainingRun], list[TrainingRun]]]:
    """The objectives that were trained in BF16 and in FP16, with their runs."""
    for objective in dict.fromkeys(objective for _, objective in results.matrix):
        bf16, fp16 = (results.training_runs(precision, objective) for precision in ("bf16", "fp16"))
        if bf16 and fp16:
            yield objective, bf16, fp16


CLAIMS: tuple[Callable[[Results], Verdict], ...] = (
    k3_ratio,
    sigma_law,
    effective_sample_size,
    slope,
    gradient_fidelity,
    untrained_scores,
    deployment_gap,
    trains_higher,
    trains_sooner,
    collapse,
    sanity_test,
)
