"""Scores of several samples a problem: avg@k, pass@k and maj@k, with intervals that resample problems.

A response that the grader timed out on says nothing about the model: it is no try. n are the tries of a problem, c of
them correct; truncated and unparseable responses are tries that failed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmatch.statistics import bootstrap_over_problems

if TYPE_CHECKING:
    from halfmatch.grading import Verdict
    from halfmatch.responses import Response


_LABELS = ("correct", "wrong", "truncated", "timeout", "unparseable")


@dataclass(frozen=True)
class Tally:
    """What became of the samples of one problem."""

    samples: int
    correct: int
    wrong: int
    truncated: int
    timeout: int
    unparseable: int
    wrong_votes: tuple[int, ...]  # how many samples gave each wrong answer, most first

    @property
    def tries(self) -> int:
        return self.samples - self.timeout


def tally(verdicts: Iterable[Verdict]) -> Tally:
    """Count one problem's verdicts. Correct answers are one answer, however they are written; wrong ones are told apart
    by their text."""
    verdicts = list(verdicts)
    labels = Counter[str](verdict.label for verdict in verdicts)
    votes = Counter(verdict.answer for verdict in verdicts if verdict.label == "wrong")
    return Tally(
        samples=len(verdicts),
        **{label: labels[label] for label in _LABELS},
        wrong_votes=tuple(sorted(votes.values(), reverse=True)),
    )


def counts(responses: Sequence[Response]) -> tuple[dict[str, Any], Tally]:
    """What became of the responses to one problem, at least one: as a row of the table of evaluations, and as such."""
    found = tally(response.verdict for response in responses)
    row = {
        "problem_id": responses[0].problem_id,
        "samples": found.samples,
        **{label: getattr(found, label) for label in _LABELS},
        "wrong_votes": found.wrong_votes,
        "mean_tokens": sum(len(response.completion.token_ids) for response in responses) / len(responses),
    }
    return row, found


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples, drawn from the n without replacement, is correct.

    1 − C(n−c, k) / C(n, k), without bias (Chen et al. 2021, arXiv 2107.03374), as a sum of logarithms over the smaller
    of k and c, so that it neither overflows nor loses small values for large n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} correct in {n} samples")
    if n - c < k:
        return 1.0
    smaller, larger = sorted((k, c))
    return float(-np.expm1(np.log1p(-larger / (n - np.arange(smaller))).sum()))


def avg_at_k(n: Sequence[int], c: Sequence[int]) -> float:
    """The mean over problems of the share of correct samples; NaN without problems."""
    if len(n) != len(c):
        raise ValueError(f"tries of {len(n)} problems and correct samples of {len(c)}")
    shares = [correct / tries for tries, correct in zip(n, c, strict=True)]
    return math.fsum(shares) / len(shares) if shares else math.nan


def majority_at_k(n: int, c: int, wrong_votes: Sequence[int], k: int) -> float:
    """The chance that the most frequent answer among k samples, drawn from the n without replacement, is correct.

    wrong_votes: how many of the n samples gave each wrong answer; samples without an answer have no vote. Ties are
    broken at random. Exact: subsets are counted, none is sampled; milliseconds for k up to 64, seconds for hundreds.
    """
    silent = n - c - sum(wrong_votes)
    if not (0 <= c <= n and silent >= 0 and 1 <= k <= n):
        raise ValueError(f"maj@{k} of {c} correct and {sum(wrong_votes)} wrong answers in {n} samples")
    won = Fraction(0)
    for votes in range(max(1, k - (n - c)), min(c, k) + 1):  # for the correct answer
        # ways[s, t]: to draw s wrong answers, none of them more than `votes` times and t of them just as often
        rest = k - votes
        ways = np.zeros((rest + 1, rest // votes + 1), dtype=object)
        ways[0, 0] = 1
        for given in wrong_votes:
            extended = np.zeros_like(ways)
            for drawn in range(min(given, votes, rest) + 1):
                tied = int(drawn == votes)
                before = ways[: rest + 1 - drawn, : ways.shape[1] - tied]
                extended[drawn:, tied:] += math.comb(given, drawn) * before
            ways = extended
        for answered in range(rest + 1):
            drawn_silent = math.comb(silent, rest - answered)
            for tied, count in enumerate(ways[answered]):
                won += Fraction(math.comb(c, votes) * int(count) * drawn_silent, tied + 1)
    return float(won / math.comb(n, k))


def scores(
    tallies: Sequence[Tally], k: Sequence[int], *, bootstrap_samples: int, seed: int, confidence: float
) -> dict[str, Any]:
    """avg, pass@k and maj@k of a benchmark: means over the problems that have tries enough, as {value, low, high}.

    Returns problems; samples and verdicts, counted over all of them; metrics: {"avg": …, "pass@1": …, "maj@1": …, …};
    and left_out: for each metric, the number of problems that time-outs of the grader left with too few tries.
    """

    def of_problem(one: Tally) -> dict[str, float]:
        enough = [i for i in k if i <= one.tries]
        return {
            **({"avg": avg_at_k([one.tries], [one.correct])} if one.tries else {}),
            **{f"pass@{i}": pass_at_k(one.tries, one.correct, i) for i in enough},
            **{f"maj@{i}": majority_at_k(one.tries, one.correct, one.wrong_votes, i) for i in enough},
        }

    def mean(values: Sequence[float]) -> dict[str, float]:
        if not values:
            return {"value": math.nan, "low": math.nan, "high": math.nan}
        column = np.array(values)
        return bootstrap_over_problems(
            lambda counts: counts @ column / counts.sum(axis=1),
            len(column),
            samples=bootstrap_samples,
            seed=seed,
            confidence=confidence,
        )._asdict()

    rows = [of_problem(one) for one in tallies]
    names = ["avg", *(f"pass@{i}" for i in k), *(f"maj@{i}" for i in k)]
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {
        "problems": len(tallies),
        "samples": sum(one.samples for one in tallies),
        "verdicts": {label: sum(getattr(one, label) for one in tallies) for label in _LABELS},
        "metrics": {name: mean(values) for name, values in columns.items()},
        "left_out": {name: len(tallies) - len(values) for name, values in columns.items()},
    }
