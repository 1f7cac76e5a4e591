"""Tables of this run's numbers beside the paper's, each with where the paper's comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from halfmatch import jobs, paper
from halfmatch.report.figures.style import label
from halfmatch.report.numbers import NOTHING, as_printed, in_percent, number, with_interval
from halfmatch.report.results import Results, estimate, over_runs
from halfmatch.report.tables import Table
from halfmatch.report.training import WINDOW, TrainingRun

_PHASES = {"start": "at the start", "end": "later", "collapse": "at collapse"}
KL_THRESHOLD = 1e-3  # nats a token
ESS_THRESHOLD = 0.5


def tags(sources: Sequence[paper.Source]) -> str:
    """Where a value comes from, as [T, C]."""
    return f"[{', '.join(sources)}]"


def offline(results: Results) -> Table:
    """The paper's offline mismatch."""
    quantities = [one for one in paper.MISMATCH if one.phase == "offline"]
    setups = results.setups

    def ours(key: str, dtype: str) -> list[str]:
        cells = [results.cell(setup, dtype) for setup in setups]
        return [with_interval(cell.metric(key)) if cell else NOTHING for cell in cells]

    return Table(
        "paper-offline",
        "Offline mismatch: sums over whole responses, of up to 32K tokens in the paper",
        ("quantity", "precision", "paper", *(f"this run, {results.setup_label(setup)}" for setup in setups)),
        tuple(
            (
                _quantity(one),
                label(one.dtype),
                f"{as_printed(one.value)} {tags(one.sources)}",
                *ours(one.key, one.dtype),
            )
            for one in quantities
        ),
        heads=2,
    )


def online(results: Results) -> Table:
    """The paper's mismatch during training."""
    objectives = list(dict.fromkeys(objective for _, objective in results.matrix))
    return Table(
        "paper-online",
        f"Mismatch during training: means over the first and the last {WINDOW} iterations, with Student's intervals "
        "over runs; extremes, and all that collapsed runs show, are the largest value seen in so many iterations",
        ("quantity", "precision", "when", "paper", *(f"this run, {objective}" for objective in objectives)),
        tuple(
            (
                _quantity(one),
                label(one.dtype),
                _PHASES[one.phase],
                f"{as_printed(one.value)} {tags(one.sources)}",
                *(_in_training(results, objective, one) for objective in objectives),
            )
            for one in paper.MISMATCH
            if one.phase != "offline"
        ),
        heads=3,
    )


def _quantity(one: paper.Quantity) -> str:
    return f"{one.what} ({one.unit})" if one.unit else one.what


def _in_training(results: Results, objective: str, one: paper.Quantity) -> str:
    """Mean over the runs, with Student's interval; the largest of any run, and of how many iterations, for extremes,
    which have none."""
    runs = results.training_runs(one.dtype, objective)
    chosen = [run for run in runs if run.collapsed] if one.phase == "collapse" else list(runs)
    if not chosen:
        return "no run collapsed" if runs else NOTHING
    part = {"start": slice(0, WINDOW), "end": slice(-WINDOW, None), "collapse": slice(None)}[one.phase]
    values = [run.series[one.key][part] for run in chosen]
    known = [value[~np.isnan(value)] for value in values if not np.isnan(value).all()]
    if not known:
        return NOTHING
    if one.phase == "collapse" or one.key == "largest_prob_diff":
        largest = number(float(max(value.max() for value in known)))
        return f"{largest}, largest of {sum(map(len, known)):,}"
    return with_interval(over_runs([float(value.mean()) for value in known], results))


def training(results: Results) -> Table:
    """The best training accuracies of the objectives that both have."""
    return Table(
        "paper-training",
        f"Best training accuracy: the paper's, and the mean over seeds of this run's best {WINDOW} iterations",
        ("objective", "precision", "paper", "this run", "seeds", "iterations"),
        tuple(
            (objective, label(precision), _peak(paper.best_training(objective, precision)), *_best(results, runs))
            for precision, objective in results.matrix
            for runs in [results.training_runs(precision, objective)]
        ),
        heads=2,
    )


def _best(results: Results, runs: Sequence[TrainingRun]) -> tuple[str, str, str]:
    if not runs:
        return NOTHING, "0", NOTHING
    mean = over_runs([run.best_reward for run in runs], results)
    return with_interval(mean), str(len(runs)), str(max(run.iterations for run in runs))


def _peak(peak: paper.Peak | None) -> str:
    if peak is None:
        return NOTHING
    step = f" at step {peak.step:,}" if peak.step else ""
    return f"{as_printed(peak.value)}{step} {tags(peak.sources)}"


def all_peaks() -> Table:
    """All of the paper's training results."""
    return Table(
        "paper-peaks",
        "The paper's training results",
        ("run", "precision", "measure", "best", "step", "framework", "note", "source"),
        tuple(
            (
                peak.run,
                label(peak.dtype),
                peak.what,
                as_printed(peak.value),
                f"{peak.step:,}" if peak.step else NOTHING,
                peak.framework or NOTHING,
                peak.note or NOTHING,
                tags(peak.sources),
            )
            for peak in paper.TRAINING
        ),
        heads=2,
    )


def untrained(results: Results) -> Table:
    """Scores of the untrained model by precision."""
    rows: list[tuple[str, ...]] = []
    for benchmark, budget in dict.fromkeys((score.benchmark, score.budget_tokens) for score in paper.OFFLINE_SCORES):
        scores = {
            score.dtype: f"{score.percent:.2f} {tags(score.sources)}"
            for score in paper.OFFLINE_SCORES
            if (score.benchmark, score.budget_tokens) == (benchmark, budget)
        }
        rows.append(
            ("paper", f"{benchmark}, {budget:,} tokens", *(scores[dtype] for dtype in ("bf16", "fp16", "fp32")))
        )
    cells = [cell for cell in results.evaluations if cell.run == jobs.INITIAL]
    for problems, engine in dict.fromkeys((cell.problems, cell.engine) for cell in cells):
        ours = {
            cell.precision: with_interval(in_percent(estimate(cell.metrics["metrics"]["avg"])))
            for cell in cells
            if (cell.problems, cell.engine) == (problems, engine)
        }
        rows.append(
            ("this run", f"{problems}, {engine}", *(ours.get(dtype, NOTHING) for dtype in ("bf16", "fp16", "fp32")))
        )
    return Table(
        "paper-untrained",
        "Scores of the untrained model: avg@k, in percent",
        ("from", "benchmark", *map(label, ("bf16", "fp16", "fp32"))),
        tuple(rows),
        heads=2,
    )


def grid(results: Results) -> Table:
    """Trainer and engine in different dtypes."""
    return Table(
        "paper-grid",
        "Precision of trainer and engine",
        ("trainer", "engine", "paper", "this run"),
        tuple(
            (
                label(cell.train),
                label(cell.rollout),
                f"{cell.outcome} {tags(cell.sources)}",
                _collapses(
                    run
                    for run in results.runs
                    if results.config.precisions[run.name.precision].compute == cell.train
                    and results.config.precisions[run.name.precision].rollout == cell.rollout
                ),
            )
            for cell in paper.GRID
        ),
        heads=2,
    )


def _collapses(runs: Iterable[TrainingRun]) -> str:
    listed = list(runs)
    return f"{sum(run.collapsed for run in listed)} of {len(listed)} runs collapsed" if listed else "not trained"


def findings(results: Results) -> Table:
    """What others found later, and what this run's own numbers look like."""
    return Table(
        "findings",
        "What others found later",
        ("finding", "bears on the paper's reading", "this run"),
        tuple(
            (one.text, "supports it" if one.supports else "against or beside it", _own(results, one.key))
            for one in paper.LATER_FINDINGS
        ),
    )


def _own(results: Results, key: str) -> str:
    """This run's numbers on a finding."""
    runs = results.runs
    if key == "kl-precedes":
        return _split(runs, "k3", lambda value: value >= KL_THRESHOLD, f"k3 of {KL_THRESHOLD:g} or more at the start")
    if key == "ess-predicts":
        return _split(
            runs, "ess_share", lambda value: value < ESS_THRESHOLD, f"ESS/N below {ESS_THRESHOLD} at the start"
        )
    if key == "both-collapse":
        names = dict.fromkeys(run.name.precision for run in runs)
        parts = [f"{label(n)}: {_collapses(run for run in runs if run.name.precision == n)}" for n in names]
        return "; ".join(parts) or NOTHING
    if key == "none-collapses":
        return _collapses(runs) if runs else NOTHING
    return "not measured here"


def _split(runs: Sequence[TrainingRun], column: str, has: Callable[[float], bool], what: str) -> str:
    starts = [(run, run.series[column][:WINDOW]) for run in runs]
    known = [(run, float(np.nanmean(start))) for run, start in starts if not np.isnan(start).all()]
    if not known:
        return NOTHING
    sides = [[run for run, value in known if has(value) is side] for side in (True, False)]
    return f"with {what}: {_collapses(sides[0])}; others: {_collapses(sides[1])}"


def settings() -> Table:
    """The paper's settings in words."""
    return Table(
        "paper-settings",
        "The paper's settings",
        ("setting", "value", "source"),
        tuple((one.item, one.value, tags(one.sources)) for one in paper.SETTINGS),
    )
