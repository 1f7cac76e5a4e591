"""What tends to come before a collapse, told while the reward still rises; docs/monitors.md has the rules and
why they are what they are.

Each signal is averaged over the iterations of a window and held against a bound of its own, or against the median of
the run's first iterations. All are functions of the rows of a log so far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

# Iterations that a signal is averaged over, so that no single one warns.
WINDOW = 5
# Iterations whose median a signal is compared with where it has to change to warn.
START = 10
# k3 that is this many times its start's, and not tiny: the policies drift apart (it precedes collapse in the paper).
GROWTH = 5.0
SMALLEST_K3 = 1e-3
# Largest |π − μ|: the trainer and the engine are sure of different tokens. The paper's collapsing runs reach 1.
LARGEST_DIFFERENCE = 0.9
# Effective share of the responses: they are longer than the usable length of sequence-level importance sampling.
SMALLEST_ESS = 0.5
# Of the entropy at the start: below, the policy has settled, too early where it does not solve its problems; above, it
# turns to noise.
ENTROPY_RANGE = (0.1, 2.0)
SOLVED = 0.95
# Share of tokens or responses that an objective's mask keeps: below, it learns from a selected minority.
SMALLEST_KEPT = 0.5


@dataclass(frozen=True)
class Signal:
    """A quantity of the log, and the rule by which it warns."""

    name: str
    value: Callable[[Row], float | None]
    judge: Callable[[float, float | None, float], str | None]  # of its mean, its start and the reward: what is wrong


def crossed(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Name and finding of every signal that is beyond its bound in the iterations that end with the newest row."""
    rewards = _by_iteration(rows, lambda row: row["reward"])[-WINDOW:]
    reward = statistics.fmean(rewards) if rewards else math.nan
    for signal in SIGNALS:
        values = _by_iteration(rows, signal.value)
        if len(values) < WINDOW:
            continue
        start = statistics.median(values[:START]) if len(values) > START else None
        finding = signal.judge(statistics.fmean(values[-WINDOW:]), start, reward)
        if finding:
            last = rows[-1]["iteration"]
            yield signal.name, f"{finding} (mean of {WINDOW} iterations up to {last})"


def _by_iteration(rows: Sequence[Row], value: Callable[[Row], float | None]) -> list[float]:
    """The mean over the rows of each iteration that has the value; those without any are left out."""
    known: dict[int, list[float]] = {}
    for row in rows:
        one = value(row)
        if one is not None and not math.isnan(one):
            known.setdefault(row["iteration"], []).append(one)
    return [statistics.fmean(some) for some in known.values()]


def _mismatch(mean: float, start: float | None, reward: float) -> str | None:
    if start is None or mean <= max(GROWTH * start, SMALLEST_K3):
        return None
    times = mean / start if start else math.inf
    return f"k3 is {mean:.2g} nats a token, {times:.1f} times its start's {start:.2g}"


def _difference(mean: float, start: float | None, reward: float) -> str | None:
    return f"it is {mean:.2f}, above {LARGEST_DIFFERENCE:g}" if mean > LARGEST_DIFFERENCE else None


def _ess(mean: float, start: float | None, reward: float) -> str | None:
    return f"it is {mean:.2f} of the responses, below {SMALLEST_ESS:g}" if mean < SMALLEST_ESS else None


def _entropy(mean: float, start: float | None, reward: float) -> str | None:
    low, high = ENTROPY_RANGE
    if not start or low * start <= mean <= high * start or (mean < start and reward >= SOLVED):
        return None  # also of a policy that was certain at the start, which has no multiples
    return f"it is {mean:.2g} nats a token, {mean / start:.2g} times its start's {start:.2g}"


def _kept(mean: float, start: float | None, reward: float) -> str | None:
    return f"the objective keeps {mean:.0%}, less than {SMALLEST_KEPT:.0%}" if mean < SMALLEST_KEPT else None


def _largest_difference(row: Row) -> float | None:
    ends = (row["max_prob_diff"], row["min_prob_diff"])
    return None if None in ends else max(abs(end) for end in ends)


SIGNALS: tuple[Signal, ...] = (
    Signal("mismatch", lambda row: row["k3"], _mismatch),
    Signal("largest |π − μ|", _largest_difference, _difference),
    Signal("effective sample size", lambda row: row["ess_share"], _ess),
    Signal("entropy", lambda row: row["entropy"], _entropy),
    Signal("kept share", lambda row: row["kept_share"], _kept),
)
