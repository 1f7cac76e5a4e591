"""The deployment gap: what accuracy the same weights lose, or win, where an engine answers and not the trainer.

The `trainer` engine samples from π, the policy that was trained; a rollout engine samples from μ. Both answer the same
requests, so their responses pair up by problem and seed. The transformers engine and the trainer draw with the same
random numbers, and with `engine.draws: race` so does vLLM: then the pairs differ by rounding alone. Without it vLLM has
numbers of its own, and its responses pair up by problem only.

Two statements are made of the gap, because neither does for both. Its interval resamples problems: samples of one
problem depend on each other, and the question is what happens on other problems of the kind. The test that it is zero
flips signs of problems: were it the same which of the two answered, every problem's difference would be as likely as
its negative. That is exact for few problems and rare flips, where a bootstrap's interval is too narrow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halfmatch import artifacts
from halfmatch.statistics import Estimate, bootstrap, sign_flip_p, wilson_interval


@dataclass(frozen=True)
class Pairs:
    """Responses to the same requests, by an engine and by the trainer: arrays [pairs]."""

    problems: NDArray[np.str_]  # problem ids
    deployed: NDArray[np.bool_]  # whether the engine's is correct
    trained: NDArray[np.bool_]  # whether the trainer's is correct
    same: NDArray[np.bool_]  # whether the two are the same, token for token


@dataclass(frozen=True)
class Gap:
    """Accuracy deployed beside accuracy in the trainer; estimates are means over problems of means over their pairs."""

    problems: int
    pairs: int
    trained: Estimate  # avg@k
    deployed: Estimate
    difference: Estimate  # deployed − trained
    p_sign_flip: float
    gained: int  # pairs in which the engine alone is correct
    lost: int  # pairs in which the trainer alone is
    same: Estimate  # share of pairs with the same tokens


def pair(deployed: Path, trained: Path) -> Pairs:
    """Pair two tables of responses. A pair in which the grader timed out on either says nothing and is left out."""
    ours, theirs = _outcomes(deployed), _outcomes(trained)
    keys = [
        key for key in sorted(ours.keys() & theirs.keys()) if "timeout" not in (ours[key].verdict, theirs[key].verdict)
    ]
    return Pairs(
        np.array([problem for problem, _ in keys], dtype=np.str_),
        np.array([ours[key].verdict == "correct" for key in keys], dtype=np.bool_),
        np.array([theirs[key].verdict == "correct" for key in keys], dtype=np.bool_),
        np.array([ours[key].tokens == theirs[key].tokens for key in keys], dtype=np.bool_),
    )


def together(some: Sequence[Pairs]) -> Pairs:
    """The pairs of several sets of weights as one; a problem's pairs stay together, whichever weights they are of."""
    columns = ([getattr(pairs, name) for pairs in some] for name in ("problems", "deployed", "trained", "same"))
    return Pairs(*(np.concatenate(column) for column in columns))


def gap(pairs: Pairs, *, bootstrap_samples: int, seed: int, confidence: float) -> Gap | None:
    """The gap with its interval and test; None without a pair.

    Where no verdict differs a bootstrap would give an interval of no width. The gap is then at most the share of
    verdicts that differ, and the interval reaches as far either way as Wilson's of that share, 0 of the pairs. So it is
    for the share of equal responses where all or none are.
    """
    if not len(pairs.problems):
        return None
    _, of_pair, sizes = np.unique(pairs.problems, return_inverse=True, return_counts=True)
    columns = {
        "trained": pairs.trained,
        "deployed": pairs.deployed,
        "difference": pairs.deployed.astype(np.float64) - pairs.trained,
        "same": pairs.same,
    }
    means = {name: np.bincount(of_pair, weights=column) / sizes for name, column in columns.items()}
    estimates = bootstrap(
        lambda counts: {name: counts @ mean / counts.sum(axis=1) for name, mean in means.items()},
        len(sizes),
        samples=bootstrap_samples,
        seed=seed,
        confidence=confidence,
    )
    known = {name: Estimate(*map(float, estimate)) for name, estimate in estimates.items()}
    gained, lost = (int((pairs.deployed & ~pairs.trained).sum()), int((pairs.trained & ~pairs.deployed).sum()))
    if pairs.same.all() or not pairs.same.any():
        known["same"] = Estimate(known["same"].value, *wilson_interval(int(pairs.same.sum()), len(of_pair), confidence))
    if gained == lost == 0:
        _, most = wilson_interval(0, len(of_pair), confidence)
        known["difference"] = Estimate(0.0, -most, most)
    return Gap(
        problems=len(sizes),
        pairs=len(of_pair),
        p_sign_flip=sign_flip_p(means["difference"]),
        gained=gained,
        lost=lost,
        **known,
    )


@dataclass(frozen=True)
class _Outcome:
    verdict: str
    tokens: bytes  # digest of the token ids


def _outcomes(path: Path) -> dict[tuple[str, int], _Outcome]:
    """Verdict and tokens of every response, by problem and sample."""
    outcomes = {}
    for group in artifacts.row_groups(path, "completions", ["problem_id", "sample", "token_ids", "verdict"]):
        token_ids = group["token_ids"].combine_chunks()
        flat, ends = token_ids.flatten().to_numpy(), np.cumsum(token_ids.value_lengths().to_numpy())
        names = (group[name].to_pylist() for name in ("problem_id", "sample", "verdict"))
        for problem, sample, verdict, start, end in zip(*names, [0, *ends[:-1]], ends, strict=True):
            outcomes[problem, sample] = _Outcome(verdict, hashlib.sha256(flat[start:end].tobytes()).digest())
    return outcomes
