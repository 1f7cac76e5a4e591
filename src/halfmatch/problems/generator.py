"""The built-in task: products of two factors of one digit, or of two."""

from __future__ import annotations

import hashlib

from halfmatch.config import ProblemSource
from halfmatch.errors import UserError
from halfmatch.problems.sources import Row


def products(lowest: int, highest: int) -> list[tuple[str, str]]:
    """Every problem with its answer: ("7x8", "56"), ("2x3", "06"), …, or with factors beyond 9 ("07x12", "0084"), ….

    All factors have the digits that the highest needs and all answers twice as many, so both are of one length.
    """
    digits, factors = len(str(highest)), range(lowest, highest + 1)
    return [(f"{a:0{digits}d}x{b:0{digits}d}", f"{a * b:0{2 * digits}d}") for a in factors for b in factors]


def read(spec: ProblemSource) -> list[Row]:
    """The products of one split, as rows."""
    everything = products(spec.lowest_factor, spec.highest_factor)
    heldout = _heldout([problem for problem, _ in everything], spec.heldout_share)
    splits = {"all": (True, False), "heldout": (True,), "train": (False,)}
    chosen = [(problem, answer) for problem, answer in everything if (problem in heldout) in splits[spec.split]]
    if not chosen:
        raise UserError(
            f"the split {spec.split} has none of the {len(everything)} products of {spec.lowest_factor} to "
            f"{spec.highest_factor}: change heldout_share, which is {spec.heldout_share:g}"
        )
    return [Row(number, problem, answer) for number, (problem, answer) in enumerate(chosen)]


def _heldout(problems: list[str], share: float) -> set[str]:
    """The problems that are held out, `share` of them.

    Which ones is decided by hashes of their text, so that no seed moves them. 7x8 and 8x7 stay together: what was
    trained on one has seen the other.
    """
    left = round(share * len(problems))
    heldout: set[str] = set()
    pairs = {"x".join(sorted(problem.split("x"))) for problem in problems}
    for pair in sorted(pairs, key=lambda pair: hashlib.sha256(pair.encode()).digest()):
        both = {pair, "x".join(reversed(pair.split("x")))}
        if len(both) <= left:
            heldout |= both
            left -= len(both)
    return heldout
