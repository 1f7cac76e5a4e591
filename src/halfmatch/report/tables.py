"""The report's tables, as text cells: what a page, or anything else, only has to lay out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from halfmatch import jobs, paper
from halfmatch.config import Config
from halfmatch.paths import Run
from halfmatch.report.figures.style import label
from halfmatch.report.numbers import NOTHING, in_percent, number, percent, with_interval
from halfmatch.report.results import Results, estimate, over_runs
from halfmatch.report.training import WINDOW, TrainingRun
from halfmatch.statistics import Estimate, bootstrap, wilson_interval

VERDICTS = ("solved", "wrong", "truncated", "timeout", "unparseable")


@dataclass(frozen=True)
class Table:
    """A table; the first `heads` cells of a row say what the row is of, the others are values."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heads: int = 1

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError(f"table {self.name}: a row is not as long as the header")


def _table(name: str, caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, heads: int = 1) -> Table:
    return Table(name, caption, tuple(header), tuple(tuple(row) for row in rows), heads)


# ----------------------------------------------------------------------------------------------------------- mismatch
def headline(results: Results) -> Table:
    """The numbers of report/headline.json with their intervals."""
    objectives = list(dict.fromkeys(name for cell in results.cells for name in cell.objectives))
    return _table(
        "headline",
        "Mismatch of trainer and engine at fixed weights",
        (
            *("model", "precision", "k3 (nats a token)", "σ of Σd, seen", "σ by the law", "ESS/N"),
            *("usable length T½ (tokens)", *(f"gradient cosine, {objective}" for objective in objectives)),
        ),
        (
            (
                results.setup_label(cell.setup),
                label(cell.precision),
                with_interval(cell.metric("k3")),
                with_interval(cell.metric("sigma")),
                with_interval(cell.metric("sigma_predicted")),
                with_interval(cell.metric("ess_share")),
                with_interval(cell.metric("usable_length")),
                *(with_interval(cell.cosine(objective)) for objective in objectives),
            )
            for cell in results.cells
        ),
        heads=2,
    )


_METRICS = {
    "k1": "k1 = mean −d (nats a token)",
    "k2": "k2 = mean d²/2 (nats a token)",
    "chi2": "χ² = mean e^{2d} − 1",
    "mean_abs_prob_diff": "mean |π − μ|",
    "max_prob_diff": "largest π − μ seen",
    "min_prob_diff": "smallest π − μ seen",
    "share_above_0.01": "share of |d| > 0.01",
    "share_above_0.1": "share of |d| > 0.1",
    "share_above_1": "share of |d| > 1",
    "kl_sequence": "KL[μ‖π] of a response (nats)",
    "slope_per_1k": "slope of Σd (nats per 1,000 tokens)",
    "perplexity_ratio": "perplexity ratio π/μ",
    "mean_length": "mean length (tokens)",
}


def mismatch(results: Results) -> Table:
    """All other metrics."""
    return _table(
        "mismatch",
        "All metrics of the offline mismatch, d = log π − log μ; the largest and smallest are what was seen, "
        "not estimates",
        ("model", "precision", *_METRICS.values(), "responses", "tokens", "non-finite tokens"),
        (
            (
                results.setup_label(cell.setup),
                label(cell.precision),
                *(with_interval(cell.metric(name)) for name in _METRICS),
                *(f"{cell.analysis[name]:,}" for name in ("sequences", "tokens", "non_finite_tokens")),
            )
            for cell in results.cells
        ),
        heads=2,
    )


def grid(results: Results) -> Table:
    """Every pair of the grid, the precision that was sampled in and the one that scored."""
    names = results.config.mismatch.grid
    pairs = {(cell.setup, cell.rollout, cell.train): cell for cell in [*results.cells, *results.crossed]}
    cells = [
        cell
        for setup in results.setups
        for rollout in names
        for train in names
        if (cell := pairs.get((setup, rollout, train)))
    ]
    return _table(
        "grid",
        "The grid: responses of one precision, scored in another",
        ("model", "engine", "trainer", "k3 (nats a token)", "σ of Σd", "ESS/N", "usable length T½ (tokens)"),
        (
            (
                results.setup_label(cell.setup),
                label(cell.rollout),
                label(cell.train),
                *(with_interval(cell.metric(name)) for name in ("k3", "sigma", "ess_share", "usable_length")),
            )
            for cell in cells
        ),
        heads=3,
    )


def parts(results: Results) -> Table:
    """How much of the KL goes away with each part in fp32 on both sides."""
    return _table(
        "parts",
        "KL over the whole vocabulary (nats a token), as it is and with a part in fp32 on both sides",
        ("model", "precision", "in fp32", "KL", "goes away"),
        (
            (results.setup_label(cell.setup), label(cell.precision), part, *numbers)
            for cell in results.origins
            for part, *numbers in [
                ("nothing more", with_interval(estimate(cell.content["kl"])), NOTHING),
                *(
                    (one["part"], *(with_interval(estimate(one[name])) for name in ("kl", "removed")))
                    for one in cell.content["parts"]
                ),
            ]
        ),
        heads=3,
    )


_GRADIENT = {
    "cosine": "cosine",
    "norm_ratio": "ratio of norms",
    "variance": "variance",
    "squared_bias": "squared bias",
    "balance_responses": "responses at which bias outweighs noise",
}


def gradients(results: Results) -> Table:
    """What is known of every objective's gradient; variance and bias in units of the exact gradient's square."""
    return _table(
        "gradients",
        "Gradients beside the exact one; variance over problems, and squared bias, in units of its squared norm",
        ("model", "precision", "objective", *_GRADIENT.values(), "loss scale"),
        (
            (
                results.setup_label(cell.setup),
                label(cell.precision),
                objective,
                *(with_interval(estimate(known.get(name))) for name in _GRADIENT),
                number(known.get("loss_scale")),
            )
            for cell in results.cells
            for objective, known in (cell.fidelity["objectives"] if cell.fidelity else {}).items()
        ),
        heads=3,
    )


# ----------------------------------------------------------------------------------------------------------- training
def training(results: Results) -> Table:
    """What became of every run."""
    confidence = results.config.report.confidence
    return _table(
        "training",
        f"Runs of the training matrix. Final reward: the mean of the last {WINDOW} iterations, with Student's interval "
        "over them. All else is what was seen of one draw, with no claim beyond it; the best reward is a mean of "
        f"{WINDOW} iterations as well",
        (
            *("precision", "objective", "seed", "iterations", "final reward", "best reward"),
            *("reward, whole run", "steps skipped", "what the monitors said"),
        ),
        (
            (
                label(run.name.precision),
                run.name.objective,
                str(run.name.seed),
                str(run.iterations) if run.iterations == run.planned else f"{run.iterations} of {run.planned}",
                with_interval(run.final_estimate(confidence)),
                number(run.best_reward),
                number(run.mean_reward),
                percent(float(run.series["skip_share"][-1]), 1),
                "; ".join(f"step {step}: {event}" for step, event in run.events) or NOTHING,
            )
            for run in results.runs
        ),
        heads=3,
    )


def training_by_precision(results: Results) -> Table:
    """Every precision and objective over its seeds."""
    confidence = results.config.report.confidence

    def collapsed(runs: Sequence[TrainingRun]) -> str:
        count = sum(run.collapsed for run in runs)
        low, high = wilson_interval(count, len(runs), confidence)
        return f"{count} of {len(runs)} [{percent(low)}, {percent(high)}]"

    return _table(
        "training-precisions",
        "Rewards over seeds, with Student's intervals, and how many runs collapsed, with Wilson's",
        ("precision", "objective", "seeds", "final reward", "best reward", "reward, whole run", "collapsed"),
        (
            (
                label(precision),
                objective,
                str(len(runs)),
                *(
                    with_interval(over_runs(values, results))
                    for values in (
                        [run.final_reward for run in runs],
                        [run.best_reward for run in runs],
                        [run.mean_reward for run in runs],
                    )
                ),
                collapsed(runs),
            )
            for precision, objective in results.matrix
            if (runs := results.training_runs(precision, objective))
        ),
        heads=2,
    )


def evaluation(results: Results) -> Table:
    """Scores of the initial model and of every run."""
    settings = results.config.evaluation
    samples, k = (settings.samples, settings.k) if settings else (0, ())
    names = ["avg", *(f"{kind}@{i}" for kind in ("pass", "maj") for i in k)]
    return _table(
        "evaluation",
        f"Scores, {samples} responses a problem; intervals resample problems",
        (
            *("weights", "benchmark", "engine", "sampled in"),
            *(f"avg@{samples}" if name == "avg" else name for name in names),
            *("problems", "truncated", "grader timed out"),
        ),
        (
            (
                weights_label(cell.run),
                cell.problems,
                cell.engine,
                label(cell.precision),
                *(with_interval(estimate(cell.metrics["metrics"].get(name))) for name in names),
                str(cell.metrics["problems"]),
                *(
                    f"{cell.metrics['verdicts'][verdict]:,} of {cell.metrics['samples']:,}"
                    for verdict in ("truncated", "timeout")
                ),
            )
            for cell in results.evaluations
        ),
        heads=4,
    )


def weights_label(run: str) -> str:
    """What a set of weights is called."""
    if run == jobs.INITIAL:
        return "initial model"
    name = Run.parse(run)
    return f"{label(name.precision)}, {name.objective}, seed {name.seed}"


# ----------------------------------------------------------------------------------------------------------- problems
def perfectible(results: Results) -> Table:
    """How many problems were tried, kept and left out, and what became of the tries."""
    table, band = results.perfectible, results.config.solvability
    if table is None:
        return _table("perfectible", "The perfectible set", ("", "this run", "paper"), ())
    rates, kept = table["solve_rate"].to_numpy(), pc.sum(table["kept"]).as_py() or 0
    counts = {name: pc.sum(table[name]).as_py() or 0 for name in VERDICTS}
    shares = _shares_of_tries(table, results.config)
    return _table(
        "perfectible",
        f"The perfectible set of {band.problems!r}: model {band.model}, sampled in {label(band.precision)}. Shares of "
        "tries with intervals over problems",
        ("", "this run", "paper"),
        [
            ("problems tried", f"{len(rates):,}", "MATH [T, C]"),
            ("responses a problem", f"{band.samples}", f"{paper.PERFECTIBLE_TRIES} [T, C]"),
            ("band of solve rates kept", _band(band.low, band.high), f"{_band(*paper.PERFECTIBLE_BAND)} [T, C]"),
            ("problems kept", f"{kept:,}", f"{paper.PERFECTIBLE_PROBLEMS:,} [C]"),
            ("left out, solved less often", f"{int((rates < band.low).sum()):,}", NOTHING),
            ("left out, solved more often", f"{int((rates > band.high).sum()):,}", NOTHING),
            *(
                (f"tries {verdict}", f"{count:,} ({with_interval(in_percent(shares[verdict]))} %)", NOTHING)
                for verdict, count in counts.items()
            ),
        ],
    )


def _shares_of_tries(table: pa.Table, config: Config) -> dict[str, Estimate]:
    """The share of each verdict among all tries."""
    tries = table["tries"].to_numpy()
    columns = {name: table[name].to_numpy() for name in VERDICTS}
    with np.errstate(invalid="ignore"):  # without a try there is no share
        found = bootstrap(
            lambda drawn: {name: drawn @ column / (drawn @ tries) for name, column in columns.items()},
            len(tries),
            samples=config.report.bootstrap_samples,
            seed=config.seed,
            confidence=config.report.confidence,
        )
    return {name: Estimate(*map(float, share)) for name, share in found.items()}


def _band(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"


def excluded(results: Results) -> Table:
    """Rows of the sources that did not become problems."""
    return _table(
        "excluded",
        "Rows of the sources that did not become problems",
        ("problem set", "row", "reason", "problem"),
        (
            (name, str(row["row"]), row["reason"], _cut(row["problem"]))
            for name, table in results.excluded.items()
            for row in table.to_pylist()
        ),
        heads=2,
    )


def _cut(text: str, length: int = 120) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


# ------------------------------------------------------------------------------------------------------------- origin
def precisions(results: Results) -> Table:
    """What each precision means, as configured."""
    return _table(
        "precisions",
        "Precisions, as configured",
        ("precision", "trainer computes in", "engine holds", "masters", "reduced in", "fp32 modules", "loss scaling"),
        (
            (
                label(name),
                one.compute,
                one.rollout,
                one.master,
                one.reduce,
                ", ".join(one.fp32_modules) or "none",
                f"from {one.loss_scaling.initial_scale:g}, ×{one.loss_scaling.growth_factor:g} after "
                f"{one.loss_scaling.growth_interval}, ×{one.loss_scaling.backoff_factor:g}"
                if one.loss_scaling
                else "none",
            )
            for name, one in results.config.precisions.items()
        ),
    )


def missing(results: Results) -> Table:
    """What the configuration asks for and the report was made without."""
    return _table(
        "missing",
        "Not there when this report was made",
        ("file", "made by"),
        ((one.path, one.command) for one in results.missing),
    )
