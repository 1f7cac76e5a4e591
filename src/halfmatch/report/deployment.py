"""The deployment gap of every set of weights: what the report says of it, as tables, as text and for the headline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from halfmatch import deployment, jobs
from halfmatch.deployment import Gap, Pairs
from halfmatch.paths import Run
from halfmatch.report.figures.style import label
from halfmatch.report.numbers import counted, in_percent, number, with_interval
from halfmatch.report.results import EvaluationCell, Results
from halfmatch.report.tables import Table, weights_label


@dataclass(frozen=True)
class Deployment:
    """Some weights on one benchmark, deployed in one engine and precision."""

    weights: str  # what the weights are, in words
    trained_in: str | None  # precision; None for the initial model
    benchmark: str
    engine: str
    precision: str
    runs: int
    gap: Gap


def by_precision(results: Results) -> list[Deployment]:
    """All runs that were trained in one precision together; the initial model by itself."""

    def group(cell: EvaluationCell) -> tuple[str, str | None]:
        trained_in = _trained_in(cell)
        return ("initial model", None) if trained_in is None else (f"trained in {label(trained_in)}", trained_in)

    return _deployments(results, group)


def by_run(results: Results) -> list[Deployment]:
    """Every run by itself."""
    return [
        one
        for one in _deployments(results, lambda cell: (weights_label(cell.run), _trained_in(cell)))
        if one.trained_in is not None
    ]


def _trained_in(cell: EvaluationCell) -> str | None:
    return None if cell.run == jobs.INITIAL else Run.parse(cell.run).precision


def _deployments(results: Results, group: Any) -> list[Deployment]:
    members: dict[tuple[str, str | None, str, str, str], list[Pairs]] = {}
    for cell, pairs in _paired(results):
        members.setdefault((*group(cell), cell.problems, cell.engine, cell.precision), []).append(pairs)
    settings = results.config.report
    found = []
    for key, some in members.items():
        gap = deployment.gap(
            deployment.together(some),
            bootstrap_samples=settings.bootstrap_samples,
            seed=results.config.seed,
            confidence=settings.confidence,
        )
        if gap:
            found.append(Deployment(*key, len(some), gap))
    return found


def _paired(results: Results) -> Iterator[tuple[EvaluationCell, Pairs]]:
    """Every evaluation in an engine beside the trainer's of the same weights: in the precision that they were trained
    in, for the initial model in the one that is deployed."""
    trained = {
        (cell.run, cell.problems, cell.precision): cell.responses
        for cell in results.evaluations
        if cell.engine == jobs.TRAINER
    }
    for cell in results.evaluations:
        reference = trained.get((cell.run, cell.problems, _trained_in(cell) or cell.precision))
        if cell.engine != jobs.TRAINER and cell.responses and reference:
            yield cell, deployment.pair(cell.responses, reference)


# ------------------------------------------------------------------------------------------------------------- tables
def table(name: str, caption: str, deployments: Sequence[Deployment]) -> Table:
    """Gaps in percentage points."""
    return Table(
        name,
        caption,
        (
            *("weights", "benchmark", "deployed in", "avg@k in the trainer, %", "avg@k deployed, %"),
            *("gap, percentage points", "sign-flip p", "verdicts gained and lost", "the same token for token, %"),
        ),
        tuple(
            (
                one.weights,
                one.benchmark,
                f"{one.engine}, {label(one.precision)}",
                with_interval(in_percent(one.gap.trained)),
                with_interval(in_percent(one.gap.deployed)),
                with_interval(in_percent(one.gap.difference), 2),
                number(one.gap.p_sign_flip, 2),
                f"{one.gap.gained:,} and {one.gap.lost:,} of {one.gap.pairs:,}",
                with_interval(in_percent(one.gap.same)),
            )
            for one in deployments
        ),
        heads=3,
    )


# --------------------------------------------------------------------------------------------------------------- text
def statement(deployments: Sequence[Deployment]) -> str:
    """What the gaps come to, precision by precision, in their own engine dtype."""
    said = [_said(one) for one in deployments if one.trained_in == one.precision]
    return " ".join(said) or "No trained weights have been evaluated by the trainer and by an engine."


def _said(one: Deployment) -> str:
    gap = one.gap.difference
    outcome = (
        "accuracy is lost"
        if gap.high < 0
        else "accuracy is won"
        if gap.low > 0
        else f"no gap is seen, one of more than {number(100 * max(-gap.low, gap.high), 2)} points being unlikely"
    )
    return (
        f"{one.weights[0].upper()}{one.weights[1:]} ({counted(one.runs, 'run')}) and deployed in "
        f"{one.engine}, {label(one.precision)}, on {one.benchmark}: {with_interval(in_percent(one.gap.same))} % of the "
        f"responses are the trainer's, {one.gap.gained + one.gap.lost:,} of {one.gap.pairs:,} have another verdict, "
        f"and {outcome}: {with_interval(in_percent(gap), 2)} percentage points."
    )


def as_headline(deployments: Sequence[Deployment]) -> dict[str, Any]:
    """By benchmark, weights, and engine with precision: estimates of the gap and of the share of equal responses, the
    p-value, and counts."""
    tree: dict[str, Any] = {}
    for one in deployments:
        place = tree.setdefault(one.benchmark, {}).setdefault(one.trained_in or jobs.INITIAL, {})
        place[f"{one.engine}-{one.precision}"] = {
            "gap": one.gap.difference._asdict(),
            "p_sign_flip": one.gap.p_sign_flip,
            "same": one.gap.same._asdict(),
            **{name: getattr(one.gap, name) for name in ("pairs", "problems", "gained", "lost")},
            "runs": one.runs,
        }
    return tree
