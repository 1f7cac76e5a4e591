"""How often the untrained model solves each problem, and which problems that makes perfectible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from halfmatch.statistics import wilson_interval

if TYPE_CHECKING:
    import pyarrow as pa


def solve_rates(
    problems: pa.Table, verdicts: Iterable[tuple[str, str]], *, low: float, high: float, confidence: float
) -> Iterator[dict[str, Any]]:
    """Rows of the table `perfectible`: every problem with its counts, kept if it was solved between `low` and `high`.

    verdicts: (problem_id, verdict) of every response. A time-out of the grader says nothing of the response, so it is
    counted and is no try.
    """
    counts: dict[str, Counter[str]] = {}
    for problem_id, verdict in verdicts:
        counts.setdefault(problem_id, Counter())[verdict] += 1
    for problem in problems.to_pylist():
        count = counts.get(problem["problem_id"], Counter())
        solved = count["correct"]
        tries = count.total() - count["timeout"]
        interval = wilson_interval(solved, tries, confidence)
        rate = solved / tries if tries else float("nan")
        yield {
            **problem,
            "tries": tries,
            "solved": solved,
            **{verdict: count[verdict] for verdict in ("wrong", "truncated", "timeout", "unparseable")},
            "solve_rate": rate,
            "solve_rate_low": interval[0],
            "solve_rate_high": interval[1],
            "kept": low <= rate <= high,
        }
