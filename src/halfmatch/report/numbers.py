"""Numbers as text, the same in figures, tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from halfmatch.statistics import Estimate

NOTHING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A number with its significant digits: 0.0123, 12.3, 1,230, 1.23e-5; a dash for one that is not known."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    size = math.floor(math.log10(abs(rounded)))
    if size < -3 or size > 6:
        mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    else:
        text = f"{rounded:,.{max(0, digits - 1 - size)}f}"
    return text.replace("-", "−", 1) if rounded < 0 else text


def as_printed(value: float) -> str:
    """A number with the digits that it was given with."""
    text = f"{value:g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−", 1) if value < 0 else text


def interval(estimate: Estimate, digits: int = 3) -> str:
    """The bounds of an estimate: [0.011, 0.014]."""
    if math.isnan(estimate.low) and math.isnan(estimate.high):
        return ""
    return f"[{number(estimate.low, digits)}, {number(estimate.high, digits)}]"


def with_interval(estimate: Estimate, digits: int = 3) -> str:
    """A number and its interval: 0.0123 [0.011, 0.014]."""
    return f"{number(estimate.value, digits)} {interval(estimate, digits)}".rstrip()


def span(estimates: Sequence[Estimate], form: Callable[[float], str] = number) -> str:
    """From the smallest of some estimates to the largest, and how far their intervals reach: 21 to 60 [19, 64]."""
    first, last = form(min(one.value for one in estimates)), form(max(one.value for one in estimates))
    values = first if first == last else f"{first} to {last}"
    bounds = [bound for one in estimates for bound in (one.low, one.high) if not math.isnan(bound)]
    return f"{values} [{form(min(bounds))}, {form(max(bounds))}]" if bounds else values


def in_percent(share: Estimate) -> Estimate:
    """A share, or a difference of shares, in percent."""
    return Estimate(*(100 * bound for bound in share))


def counted(number: int, thing: str) -> str:
    """1 seed, 2 seeds."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def percent(share: float | None, decimals: int = 0) -> str:
    """A share as a percentage: 85 %."""
    return NOTHING if share is None or math.isnan(share) else f"{100 * share:.{decimals}f} %".replace("-", "−", 1)
