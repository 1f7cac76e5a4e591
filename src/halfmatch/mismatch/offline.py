"""The offline measurement: every mismatch number of one or more `scores` tables, with intervals over problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmatch import artifacts
from halfmatch.errors import UserError
from halfmatch.mismatch.metrics import FloatArray, log_sums, sequence_values, token_values
from halfmatch.mismatch.sums import BATCHES, BUCKETS, CUTS, EDGES, LAGS, Sums
from halfmatch.statistics import Estimate, bootstrap

# What a bootstrap resamples are at most so many problems, or groups of problems.
MAX_UNITS = 1024
# Tokens that are turned into float64 and summed at a time: what a core's cache holds.
TOKENS_A_PIECE = 1 << 16
# Numbers of tokens and responses are what they are; a resample of them means nothing.
_COUNTS = ("tokens", "non_finite_tokens", "sequences")
_LAW = (
    "kl_sequence",
    "sigma",
    "sigma_predicted",
    "sigma_tokens",
    "sigma_slack",
    "ess",
    "ess_share",
    "ess_share_predicted",
)


def analyse(scores: Path | Sequence[Path], *, bootstrap_samples: int, seed: int, confidence: float) -> dict[str, Any]:
    """Read scores a row group at a time and measure. The result, where an estimate is {value, low, high}:

    problems, sequences, tokens, non_finite_sequences, non_finite_tokens: counts
    confidence, bootstrap_samples: of the intervals, which resample problems (of more than MAX_UNITS, as many groups of
        problems)
    metrics: by name, estimates of everything in `token_metrics` and `sequence_metrics`; the extremes max_prob_diff and
        min_prob_diff have no interval, because a bootstrap of an extreme has none
    positions: a row a bucket of positions in the response: start, stop (null for the last), tokens, token metrics
    lengths: the σ law, a row a length: length, sequences (that reach it; they are cut there), and estimates of
        kl_sequence, sigma, sigma_predicted, sigma_tokens, sigma_slack, ess, ess_share, ess_share_predicted
    autocorrelation: of d inside a response, a row a lag: lag, pairs, correlation
    batch_means: a row a batch size: tokens, batches, variance_per_token (the variance of Σd over a batch, a token: the
        long-run variance, once batches are longer than the correlation) and sigma_predicted (of whole responses, by it)

    A number that is undefined, as sigma is for one response, is NaN; so are the intervals for a single problem.
    """
    paths = [scores] if isinstance(scores, Path) else list(scores)
    sums, problems = _sum_up(paths)
    if not problems:
        raise UserError(f"{', '.join(map(str, paths))}: no responses to measure")
    units = min(problems, MAX_UNITS)
    additive = {name: total[:units] for name, total in sums.additive.items()}
    estimates = bootstrap(
        _statistics(additive, sums.log_weights[:units]),
        units,
        samples=bootstrap_samples,
        seed=seed,
        confidence=confidence,
    )

    def estimate(name: str, *column: int) -> dict[str, float]:
        return Estimate(*(float(array[column]) for array in estimates[name]))._asdict()

    def count(name: str, column: int = -1) -> int:
        return int(additive[name].sum(axis=0)[column])

    def names(group: str) -> list[str]:
        return [name.partition(".")[2] for name in estimates if name.startswith(f"{group}.")]

    extremes = {"max_prob_diff": float(sums.largest), "min_prob_diff": float(sums.smallest)}
    positions = [column for column in range(BUCKETS) if count("position.tokens", column)]
    lengths = [column for column in range(len(CUTS)) if count("sequence.sequences", column)]
    return {
        "problems": problems,
        "sequences": count("sequence.sequences"),
        "tokens": int(additive["position.tokens"].sum()),
        "non_finite_sequences": count("non_finite_sequences"),
        "non_finite_tokens": int(additive["position.non_finite_tokens"].sum()),
        "confidence": confidence,
        "bootstrap_samples": bootstrap_samples,
        "metrics": {
            **{name: estimate(f"token.{name}") for name in names("token")},
            **{name: estimate(f"sequence.{name}", BUCKETS - 1) for name in names("sequence")},
            **{name: Estimate(value, np.nan, np.nan)._asdict() for name, value in extremes.items()},
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


class _Units:
    """Which unit each problem is in: one of its own, in the order in which problems first appear, as long as there are
    units left; then they go round, so that memory and the bootstrap do not grow with the number of problems."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def of(self, problem_ids: Sequence[str]) -> NDArray[np.int64]:
        of = self._of
        return np.array([of.setdefault(name, len(of) % MAX_UNITS) for name in problem_ids], dtype=np.int64)

    @property
    def problems(self) -> int:
        return len(self._of)


def _sum_up(paths: Sequence[Path]) -> tuple[Sums, int]:
    """The sums over all tables, a row a unit, and how many problems there are."""
    sums, units = Sums(MAX_UNITS), _Units()
    for path in paths:
        for group in artifacts.row_groups(path, "scores", ["problem_id", "logp_rollout", "logp_train"]):
            of_row = units.of(group["problem_id"].to_pylist())
            train, rollout = (group[name].combine_chunks() for name in ("logp_train", "logp_rollout"))
            lengths = train.value_lengths().to_numpy().astype(np.int64)
            if not np.array_equal(lengths, rollout.value_lengths().to_numpy()):
                raise ValueError(f"{path}: a response has another number of log π than of log μ")
            tokens_train, tokens_rollout = (column.flatten().to_numpy() for column in (train, rollout))
            for rows, tokens in _pieces(lengths):
                sums.add(
                    of_row[rows],
                    lengths[rows],
                    tokens_train[tokens].astype(np.float64),
                    tokens_rollout[tokens].astype(np.float64),
                )
    return sums, units.problems


def _pieces(lengths: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Consecutive rows and their tokens, in pieces of about TOKENS_A_PIECE; no row is split."""
    ends = np.cumsum(lengths)
    last_rows = np.flatnonzero(np.diff(ends // TOKENS_A_PIECE, append=-1))
    first_row = first_token = 0
    for row in last_rows + 1:
        yield slice(first_row, row), slice(first_token, ends[row - 1])
        first_row, first_token = row, ends[row - 1]


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
        log_weight_sums = [log_sums(log_weights[:, power], counts) for power in range(2)]
        by_token = token_values({name: value.sum(axis=1) for name, value in position.items()})
        by_sequence = sequence_values(sequence, *log_weight_sums)
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
