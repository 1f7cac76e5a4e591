"""Where the σ law holds and where it fails: every length of every measurement, and the course of training.

docs/sigma_law.md has the law, what of it is proved, and what can break it: tails of single tokens (their variance is
not 2k), and responses that are not equally hard (σ is not what single tokens give, but within a slack of it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from halfmatch.report.figures.style import label
from halfmatch.report.numbers import NOTHING, counted, number, span, with_interval
from halfmatch.report.results import MismatchCell, Results, estimate
from halfmatch.report.tables import Table
from halfmatch.report.training import WINDOW, Floats, TrainingRun
from halfmatch.statistics import Estimate, difference, ratio, t_interval

MARGIN = 1.25  # σ seen over σ by the law, either way, within which the law is said to hold
# Effective responses that the law has to predict for an ESS that is seen to say anything: of fewer, one carries all.
FEW = 10


@dataclass(frozen=True)
class Length:
    """What was seen of responses cut to a length (or whole, at their mean length), and what the law says."""

    cell: MismatchCell
    length: float
    is_whole: bool
    responses: int
    sigma: Estimate
    sigma_law: Estimate
    kl: Estimate
    ess: Estimate
    ess_law: Estimate
    tokens: Estimate  # σ that single tokens give
    slack: Estimate  # how far from it σ can be

    @property
    def kl_law(self) -> Estimate:
        """kT, of which σ by the law is √(2kT)."""
        return Estimate(*(bound**2 / 2 for bound in self.sigma_law))

    @property
    def over_law(self) -> Estimate:
        return ratio(self.sigma, self.sigma_law)

    @property
    def ess_over_law(self) -> Estimate:
        return ratio(self.ess, self.ess_law)

    @property
    def tails(self) -> Estimate:
        return ratio(self.tokens, self.sigma_law)

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which σ seen over σ by the law has to lie, but for sampling noise."""
        law, centre, slack = self.sigma_law.value, self.tokens.value, self.slack.value
        return (max(centre - slack, 0.0) / law, (centre + slack) / law) if law > 0 else (math.nan, math.nan)

    @property
    def outcome(self) -> bool | None:
        """Whether σ follows the law: all of its interval within the margin, none of it, or neither (None)."""
        low, high = self.over_law.low, self.over_law.high
        if low >= 1 / MARGIN and high <= MARGIN:
            return True
        return False if high < 1 / MARGIN or low > MARGIN else None


def lengths(results: Results) -> list[Length]:
    """Every length that more than one response reaches, and whole responses, of every measurement."""
    return [one for cell in results.cells for one in of_cell(cell)]


def of_cell(cell: MismatchCell) -> list[Length]:
    """Those of one measurement; whole responses stand last."""

    def of(length: float, is_whole: bool, responses: int, known: Mapping[str, Estimate]) -> Length:
        return Length(
            cell,
            length,
            is_whole,
            responses,
            sigma=known["sigma"],
            sigma_law=known["sigma_predicted"],
            kl=known["kl_sequence"],
            ess=known["ess_share"],
            ess_law=known["ess_share_predicted"],
            tokens=known["sigma_tokens"],
            slack=known["sigma_slack"],
        )

    cut = [
        of(row["length"], False, row["sequences"], {name: estimate(row.get(name)) for name in _NAMES})
        for row in cell.analysis["lengths"]
        if row["sequences"] > 1
    ]
    whole = {name: cell.metric(name) for name in _NAMES}
    return [*cut, of(cell.metric("mean_length").value, True, cell.analysis["sequences"], whole)]


_NAMES = (
    *("sigma", "sigma_predicted", "kl_sequence", "ess_share", "ess_share_predicted"),
    *("sigma_tokens", "sigma_slack"),
)


def long_run(cell: MismatchCell) -> Estimate:
    """σ of whole responses by the long-run variance: of the longest batches of tokens that there are several of."""
    rows = [row for row in cell.analysis["batch_means"] if row["batches"] > 1]
    return estimate(rows[-1]["sigma_predicted"]) if rows else estimate(None)


# ----------------------------------------------------------------------------------------------------------- training
def training_law(run: TrainingRun) -> dict[str, Floats]:
    """By iteration of a run: σ by the law, σ seen over it, and ESS/N by the law; k3 and length are the iteration's."""
    kl = run.series["k3"] * run.series["response_tokens"]
    law = np.sqrt(2 * kl)
    over = np.divide(run.series["sigma"], law, out=np.full_like(law, math.nan), where=law > 0)
    return {"sigma": law, "over": over, "ess_share": np.exp(-2 * kl)}


def in_training(runs: Sequence[TrainingRun], part: slice, confidence: float) -> Estimate:
    """σ seen over σ by the law in some iterations of some runs: the geometric mean. Iterations draw anew, so their
    noise is independent."""
    over = np.concatenate([training_law(run)["over"][part] for run in runs]) if runs else np.zeros(0)
    logs = np.log(over[np.isfinite(over) & (over > 0)])
    if not len(logs):
        return estimate(None)
    return Estimate(*(math.exp(bound) for bound in (float(logs.mean()), *t_interval(logs, confidence))))


# -------------------------------------------------------------------------------------------------------------- words
def statement(results: Results) -> str:
    """Where it holds and where it fails, in plain words; nothing that the numbers do not say."""
    known = [one for one in lengths(results) if math.isfinite(one.over_law.low)]
    if not known:
        return "Too little has been measured to say where the law holds."
    return " ".join([*_of_sigma(results, known), *_of_kl_and_ess(known), *_of_training(results)])


def _of_sigma(results: Results, known: Sequence[Length]) -> Iterator[str]:
    held, failed, open_ = ([one for one in known if one.outcome is outcome] for outcome in (True, False, None))
    text = f"σ follows the law (its interval within a factor of {MARGIN:g}) at {len(held)} of {len(known)} lengths"
    yield f"{text}, at {span([one.over_law for one in held])} times it." if held else f"{text}."
    for one in failed:
        yield (
            f"It fails for {_name(results, one)}: σ is {with_interval(one.over_law)} times the law's, of which the "
            f"tails of single tokens give {with_interval(one.tails, 2)}."
        )
    if open_:
        widest = max(one.responses for one in open_)
        yield f"At {len(open_)} the sample (of at most {counted(widest, 'response')}) is too small to tell."


def _of_kl_and_ess(known: Sequence[Length]) -> Iterator[str]:
    kl = [one for one in known if _agree(one.kl, one.kl_law)]
    yield f"KL[μ‖π] of responses cannot be told from kT at {len(kl)} of {len(known)}."
    large = [one for one in known if one.responses * one.ess_law.value >= FEW]
    agree = [one for one in large if _agree(one.ess, one.ess_law)]
    others = [one.ess_over_law for one in large if one not in agree]
    elsewhere = f"; elsewhere it is {span(others, lambda value: number(value, 2))} times that" if others else ""
    yield (
        f"ESS/N cannot be told from exp(−2kT) at {len(agree)} of the {len(large)} where that leaves {FEW} responses or "
        f"more{elsewhere}."
    )
    if few := [one for one in known if one not in large]:
        worst = max((one.ess_over_law for one in few), key=lambda over: over.value)
        yield (
            f"It fails where fewer are left ({len(few)}): a few responses carry all the weight, and what is seen is up "
            f"to {with_interval(worst, 2)} times the law's."
        )


def _of_training(results: Results) -> Iterator[str]:
    confidence = results.config.report.confidence
    for precision in dict.fromkeys(run.name.precision for run in results.runs):
        runs = [run for run in results.runs if run.name.precision == precision]
        first, last = (in_training(runs, part, confidence) for part in (slice(0, WINDOW), slice(-WINDOW, None)))
        yield (
            f"While {label(precision)} trains, σ over the law is {with_interval(first)} in the first {WINDOW} "
            f"iterations and {with_interval(last)} in the last."
        )


def _agree(seen: Estimate, law: Estimate) -> bool:
    apart = difference(seen, law)
    return apart.low <= 0 <= apart.high


def _name(results: Results, one: Length) -> str:
    where = "whole responses" if one.is_whole else f"{one.length:,.0f} tokens"
    return f"{results.setup_label(one.cell.setup)} in {label(one.cell.precision)}, {where}"


# -------------------------------------------------------------------------------------------------------------- table
def table(results: Results) -> Table:
    """Every length: seen, by the law, and what lies between them."""
    outcomes = {True: "yes", False: "no", None: "cannot be told"}
    return Table(
        "sigma-law",
        "The σ law at every length: seen and predicted, with what the difference is made of",
        (
            *("model", "precision", "length (tokens)", "responses", "σ seen", "σ by the law", "seen / law"),
            *("σ by the long-run variance", "tails of single tokens", "bounds of seen / law"),
            *("KL seen (nats)", "kT", "ESS/N seen", "exp(−2kT)", "σ follows the law"),
        ),
        tuple(
            (
                results.setup_label(one.cell.setup),
                label(one.cell.precision),
                f"{one.length:,.0f}, whole" if one.is_whole else f"{one.length:,.0f}",
                f"{one.responses:,}",
                with_interval(one.sigma),
                with_interval(one.sigma_law),
                with_interval(one.over_law),
                with_interval(long_run(one.cell)) if one.is_whole else NOTHING,
                with_interval(one.tails),
                f"{number(one.bounds[0])} to {number(one.bounds[1])}",
                with_interval(one.kl, 2),
                with_interval(one.kl_law, 2),
                with_interval(one.ess),
                with_interval(one.ess_law),
                outcomes[one.outcome],
            )
            for one in lengths(results)
        ),
        heads=3,
    )
