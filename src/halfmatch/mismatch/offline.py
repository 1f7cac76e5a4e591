"""The offline measurement: every mismatch number of one or more `scores` tables, with intervals over problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmatch import artifacts
from halfmatch.errors import UserError
from halfmatch.mismatch.metrics import FloatArray, log_sum, sequence_values, token_values
from halfmatch.mismatch.sums import BATCHES, BUCKETS, CUTS, EDGES, LAGS, Sums, sums_of
from halfmatch.statistics import bootstrap

# Numbers of tokens and responses are what they are; a resample of them means nothing.
_COUNTS = ("tokens", "non_finite_tokens", "sequences")
_LAW = ("kl_sequence", "sigma", "sigma_predicted", "ess", "ess_share", "ess_share_predicted")


def analyse(scores: Path | Sequence[Path], *, bootstrap_samples: int, seed: int, confidence: float) -> dict[str, Any]:
    """Read scores a row group at a time and measure. The result, where an estimate is {value, low, high}:

    problems, sequences, tokens, non_finite_sequences, non_finite_tokens: counts
    confidence, bootstrap_samples: of the intervals, which resample problems
    metrics: by name, estimates of everything in `token_metrics` and `sequence_metrics`; the extremes max_prob_diff and
        min_prob_diff have no interval, because a bootstrap of an extreme has none
    positions: a row a bucket of positions in the response: start, stop (null for the last), tokens, token metrics
    lengths: the σ law, a row a length: length, sequences (that reach it; they are cut there), and estimates of
        kl_sequence, sigma, sigma_predicted, ess, ess_share, ess_share_predicted
    autocorrelation: of d inside a response, a row a lag: lag, pairs, correlation
    batch_means: a row a batch size: tokens, batches, variance_per_token (the variance of Σd over a batch, a token: the
        long-run variance, once batches are longer than the correlation) and sigma_predicted (of whole responses, by it)

    A number that is undefined, as sigma is for one response, is NaN; so are the intervals for a single problem.
    """
    paths = [scores] if isinstance(scores, Path) else list(scores)
    problems = _problem_sums(paths)
    if not problems:
        raise UserError(f"{', '.join(map(str, paths))}: no responses to measure")
    additive = {name: np.stack([one.additive[name] for one in problems]) for name in problems[0].additive}
    log_weights = np.stack([one.log_weights for one in problems])  # [P, 2, BUCKETS]
    estimates = bootstrap(
        _statistics(additive, log_weights), len(problems), samples=bootstrap_samples, seed=seed, confidence=confidence
    )

    def estimate(name: str, *column: int) -> dict[str, float]:
        value, low, high = (float(array[column]) for array in estimates[name])
        return {"value": value, "low": low, "high": high}

    def count(name: str, column: int = -1) -> int:
        return int(additive[name].sum(axis=0)[column])

    def names(group: str) -> list[str]:
        return [name.partition(".")[2] for name in estimates if name.startswith(f"{group}.")]

    extremes = {
        "max_prob_diff": float(np.fmax.reduce([one.largest for one in problems])),
        "min_prob_diff": float(np.fmin.reduce([one.smallest for one in problems])),
    }
    positions = [column for column in range(BUCKETS) if count("position.tokens", column)]
    lengths = [column for column in range(len(CUTS)) if count("sequence.sequences", column)]
    return {
        "problems": len(problems),
        "sequences": count("sequence.sequences"),
        "tokens": int(additive["position.tokens"].sum()),
        "non_finite_sequences": count("non_finite_sequences"),
        "non_finite_tokens": int(additive["position.non_finite_tokens"].sum()),
        "confidence": confidence,
        "bootstrap_samples": bootstrap_samples,
        "metrics": {
            **{name: estimate(f"token.{name}") for name in names("token")},
            **{name: estimate(f"sequence.{name}", BUCKETS - 1) for name in names("sequence")},
            **{name: {"value": value, "low": np.nan, "high": np.nan} for name, value in extremes.items()},
        },
        "positions": [
            {
                "start": int(EDGES[column]),
                "stop": int(EDGES[column + 1]) if column + 1 < BUCKETS else None,
                "tokens": count("position.tokens", column),
                **{name: estimate(f"position.{name}", column) for name in names("position")},
            }
            for column in positions
        ],
        "lengths": [
            {
                "length": int(CUTS[column]),
                "sequences": count("sequence.sequences", column),
                **{name: estimate(f"sequence.{name}", column) for name in _LAW},
            }
            for column in lengths
        ],
        "autocorrelation": [
            {"lag": lag, "pairs": count("lag.n", column), "correlation": estimate("autocorrelation", column)}
            for column, lag in enumerate(LAGS)
        ],
        "batch_means": [
            {
                "tokens": size,
                "batches": count("batch.n", column),
                "variance_per_token": estimate("variance_per_token", column),
                "sigma_predicted": estimate("sigma_by_batches", column),
            }
            for column, size in enumerate(BATCHES)
        ],
    }


def curves(analysis: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What depends on position, length or lag, as rows of one long table: curve, x, value, low, high.

    log_ratio is the mean of Σd over the first x tokens; x of the token metrics is where their bucket starts.
    """
    rows: list[dict[str, Any]] = []

    def add(curve: str, x: int, estimate: Mapping[str, float]) -> None:
        rows.append({"curve": curve, "x": x, **estimate})

    for row in analysis["lengths"]:
        kl = row["kl_sequence"]
        add("log_ratio", row["length"], {"value": -kl["value"], "low": -kl["high"], "high": -kl["low"]})
        for name in ("sigma", "sigma_predicted", "ess_share", "ess_share_predicted"):
            add(name, row["length"], row[name])
    for row in analysis["positions"]:
        for name in ("k1", "k3", "mean_abs_prob_diff"):
            add(name, row["start"], row[name])
    for row in analysis["autocorrelation"]:
        add("autocorrelation", row["lag"], row["correlation"])
    return sorted(rows, key=lambda row: (row["curve"], row["x"]))


def write_curves(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Curves as CSV, with the shortest digits that give the same float back; empty where a number is undefined."""
    with artifacts.atomic(path, "w") as file:
        file.write("curve,x,value,low,high\n")
        for row in rows:
            numbers = ("" if np.isnan(row[name]) else repr(float(row[name])) for name in ("value", "low", "high"))
            file.write(f"{row['curve']},{row['x']},{','.join(numbers)}\n")


def _problem_sums(paths: Sequence[Path]) -> list[Sums]:
    """The sums of every problem, in the order in which problems first appear."""
    problems: dict[str, Sums] = {}
    for path in paths:
        for problem_id, lengths, logp_train, logp_rollout in _pieces(path):
            sums = sums_of(lengths, logp_train, logp_rollout)
            problems[problem_id] = problems[problem_id] + sums if problem_id in problems else sums
    return list(problems.values())


def _pieces(path: Path) -> Iterator[tuple[str, NDArray[np.int64], FloatArray, FloatArray]]:
    """Runs of rows of one problem: its id, lengths [n], log π and log μ of the tokens laid end to end."""
    for group in artifacts.row_groups(path, "scores", ["problem_id", "logp_rollout", "logp_train"]):
        ids = np.array(group["problem_id"].to_pylist(), dtype=object)
        train, rollout = (group[name].combine_chunks() for name in ("logp_train", "logp_rollout"))
        lengths = train.value_lengths().to_numpy().astype(np.int64)
        if not np.array_equal(lengths, rollout.value_lengths().to_numpy()):
            raise ValueError(f"{path}: a response has another number of log π than of log μ")
        flat_train, flat_rollout = (column.flatten().to_numpy().astype(np.float64) for column in (train, rollout))
        ends = np.cumsum(lengths)
        changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        for first, last in itertools.pairwise([0, *changes, len(ids)]):
            tokens = slice(ends[first] - lengths[first], ends[last - 1])
            yield ids[first], lengths[first:last], flat_train[tokens], flat_rollout[tokens]


def _statistics(
    additive: Mapping[str, FloatArray], log_weights: FloatArray
) -> Callable[[FloatArray], dict[str, FloatArray]]:
    """All statistics as a function of counts [R, P], from sums of each problem: arrays [R] or [R, columns]."""

    def statistics(counts: FloatArray) -> dict[str, FloatArray]:
        total = {name: counts @ value for name, value in additive.items()}
        position, sequence, lag, batch = (
            {name.partition(".")[2]: value for name, value in total.items() if name.startswith(f"{group}.")}
            for group in ("position", "sequence", "lag", "batch")
        )
        logs = np.full((2, len(counts), BUCKETS), -np.inf)
        for power in range(2):
            for column in range(BUCKETS):
                logs[power, :, column] = log_sum(log_weights[:, power, column], counts)
        by_token = token_values({name: value.sum(axis=1) for name, value in position.items()})
        by_sequence = sequence_values(sequence, logs[0], logs[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            n, x, y = lag["n"], lag["x"], lag["y"]
            spread = np.sqrt((lag["xx"] - x**2 / n) * (lag["yy"] - y**2 / n))
            correlation = (lag["xy"] - x * y / n) / spread
            batch_variance = (batch["squares"] - batch["sum"] ** 2 / batch["n"]) / (batch["n"] - 1)
        variance_per_token = np.maximum(batch_variance, 0.0) / BATCHES
        return {
            **{f"token.{name}": value for name, value in by_token.items() if name not in _COUNTS},
            **{f"position.{name}": value for name, value in token_values(position).items() if name not in _COUNTS},
            **{f"sequence.{name}": value for name, value in by_sequence.items() if name not in _COUNTS},
            "autocorrelation": correlation,
            "variance_per_token": variance_per_token,
            "sigma_by_batches": np.sqrt(variance_per_token * by_sequence["mean_length"][:, -1:]),
        }

    return statistics
