"""Accuracy along the training: curves of runs, their means over seeds, as tables and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from halfmatch import jobs
from halfmatch.paths import Run
from halfmatch.report.figures.style import label
from halfmatch.report.numbers import NOTHING, with_interval
from halfmatch.report.results import Results, ValidationCell, estimate, over_runs
from halfmatch.report.tables import Table
from halfmatch.statistics import Estimate


@dataclass(frozen=True)
class Setting:
    """What curves are compared within: a benchmark, and where the weights answer it."""

    benchmark: str
    engine: str
    precision: str | None  # that the weights are deployed in; None for the one that each was trained in


@dataclass(frozen=True)
class Curve:
    """avg@k of one run, with intervals that resample problems, by the number of iterations."""

    run: Run
    setting: Setting
    scores: Mapping[int, Estimate]


@dataclass(frozen=True)
class Mean:
    """The seeds of one precision and objective together, after the iterations that all of them have a score of."""

    curves: Sequence[Curve]
    scores: Mapping[int, Estimate]  # Student's interval; of one seed, and of the initial model, over problems


def curves(results: Results) -> list[Curve]:
    """Every run on every benchmark, from the initial model to the trained one where these have been evaluated alike."""
    evaluated = {
        (cell.run, cell.problems, cell.engine, cell.precision): estimate(cell.metrics["metrics"].get("avg"))
        for cell in results.evaluations
    }
    trained = {run.name: run.iterations for run in results.runs}
    found = []
    for cell in results.validations:
        for benchmark, scores in cell.metrics["scores"].items():
            where = (benchmark, cell.engine, cell.precision)
            points = {int(iteration): estimate(one["metrics"].get("avg")) for iteration, one in scores.items()}
            ends = {0: jobs.INITIAL, **({trained[cell.run]: cell.run.name} if cell.run in trained else {})}
            for iteration, weights in ends.items():
                if (weights, *where) in evaluated:
                    points.setdefault(iteration, evaluated[weights, *where])
            known = {at: points[at] for at in sorted(points) if not math.isnan(points[at].value)}
            for deployed in _deployed(results, cell) if known else ():
                found.append(Curve(cell.run, Setting(benchmark, cell.engine, deployed), known))
    return found


def _deployed(results: Results, cell: ValidationCell) -> list[str | None]:
    """The settings' precisions that a cell is of: as trained, where that is known of every training, and its own."""
    training, evaluation = results.config.training, results.config.evaluation
    listed = evaluation.precisions if evaluation else None
    if listed is None or cell.engine == jobs.TRAINER:
        return [None]
    every = training is not None and set(training.precisions) <= set(listed)
    return [*([None] if every and cell.precision == cell.run.precision else []), cell.precision]


def mean(some: Sequence[Curve], results: Results) -> Mean | None:
    """The mean over seeds; None where no iteration has a score of all of them."""
    if not some:
        return None
    common = sorted(set.intersection(*(set(curve.scores) for curve in some)))
    scores = {
        # The initial model is one, however many seeds start from it.
        at: some[0].scores[at]
        if len(some) == 1 or at == 0
        else over_runs([one.scores[at].value for one in some], results)
        for at in common
    }
    return Mean(some, scores) if scores else None


def means(results: Results, setting: Setting, objective: str, known: Iterable[Curve]) -> dict[str, Mean]:
    """By the precision that was trained in, in the order of the configuration."""
    training = results.config.training
    mine = [curve for curve in known if curve.setting == setting and curve.run.objective == objective]
    found = {
        precision: mean([curve for curve in mine if curve.run.precision == precision], results)
        for precision in (training.precisions if training else ())
    }
    return {precision: one for precision, one in found.items() if one is not None}


def settings(known: Iterable[Curve]) -> list[Setting]:
    """Those that there are curves of."""
    return list(dict.fromkeys(curve.setting for curve in known))


def drawn(results: Results, known: Sequence[Curve]) -> list[Setting]:
    """Of each benchmark one: in the first engine that weights are deployed in, as trained or in the first precision."""
    first: dict[str, Setting] = {}
    for setting in sorted(settings(known), key=lambda one: (one.engine == jobs.TRAINER, one.precision is not None)):
        first.setdefault(setting.benchmark, setting)
    benchmarks = results.config.evaluation.benchmarks if results.config.evaluation else ()
    return [first[name] for name in benchmarks if name in first]


def deployed_in(setting: Setting) -> str:
    """The engine and the precision, in words."""
    return f"{setting.engine}, {label(setting.precision) if setting.precision else 'as trained'}"


# ------------------------------------------------------------------------------------------------------------- tables
def summary(results: Results) -> Table:
    """Every precision and objective: where it starts, the highest mean over seeds and where it ends."""
    known = curves(results)
    rows = [
        (
            setting.benchmark,
            deployed_in(setting),
            objective,
            label(precision),
            str(len(one.curves)),
            *(_score(one, at) for at in (min(one.scores), _highest(one), max(one.scores))),
        )
        for setting in drawn(results, known)
        for objective in _objectives(results)
        for precision, one in means(results, setting, objective, known).items()
    ]
    header = ("benchmark", "deployed in", "objective", "precision", "seeds", "first", "highest", "last")
    return Table("validation", f"{_metric(results)} along the training. {_intervals()}", header, tuple(rows), heads=4)


def table(results: Results) -> Table:
    """Every number of the curves, a column for each precision that was trained in."""
    known = curves(results)
    precisions = results.config.training.precisions if results.config.training else ()
    rows = []
    for setting in settings(known):
        for objective in _objectives(results):
            found = means(results, setting, objective, known)
            for at in sorted({iteration for one in found.values() for iteration in one.scores}):
                scores = (found[name].scores.get(at) if name in found else None for name in precisions)
                cells = (NOTHING if score is None else with_interval(score) for score in scores)
                rows.append((setting.benchmark, deployed_in(setting), objective, f"{at:,}", *cells))
    header = ("benchmark", "deployed in", "objective", "iterations", *map(label, precisions))
    caption = f"{_metric(results)} after so many iterations, by the precision of the training. {_intervals()}"
    return Table("validation-iterations", caption, header, tuple(rows), heads=4)


def _objectives(results: Results) -> Sequence[str]:
    return results.config.training.objectives if results.config.training else ()


def _highest(one: Mean) -> int:
    return max(one.scores, key=lambda iteration: (one.scores[iteration].value, -iteration))


def _score(one: Mean, at: int) -> str:
    return f"{with_interval(one.scores[at])} after {at:,}"


def _metric(results: Results) -> str:
    return f"avg@{results.config.evaluation.samples}" if results.config.evaluation else "avg"


def _intervals() -> str:
    return "Means over seeds with Student's intervals; of a single seed, and of the initial model, over problems"


# --------------------------------------------------------------------------------------------------------------- text
def statement(cells: Sequence[ValidationCell]) -> str:
    """Which weights have no score, and why."""
    lost = [
        f"{cell.run.name} after {int(iteration):,} iterations in {cell.engine}, {label(cell.precision)}"
        for cell in cells
        for iteration in cell.metrics["not_finite"]
    ]
    return f"Not finite as deployed, and so without a score: {'; '.join(lost)}." if lost else ""
