"""The few numbers that say it all: as JSON for DVC, as text for a terminal, as one sentence."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.report import deployment
from halfmatch.report.numbers import in_percent, interval, number, percent, span
from halfmatch.report.results import MismatchCell, Results, Setup, estimate, over_runs
from halfmatch.statistics import Estimate, ratio

_ESTIMATES = ("k3", "sigma", "sigma_predicted", "ess_share", "usable_length")


def headline(results: Results, claims: Mapping[str, str]) -> dict[str, Any]:
    """What `report/headline.json` holds; `claims` are the outcomes of the verdicts, by claim.

    mismatch: by setup and precision, estimates {value, low, high} of k3, sigma, sigma_predicted, ess_share and
    usable_length, and by objective of the cosine of its gradient with the exact one.
    training: by objective and precision, the number of runs, estimates over runs of the final reward (the last running
    mean) and of the reward over the whole run, and how many collapsed.
    deployment: the gap between trainer and engine, see `halfmatch.report.deployment.as_headline`.
    """
    return {
        "sentence": sentence(results),
        "mismatch": {
            results.setup_label(setup): {
                cell.precision: _of_cell(cell) for cell in results.cells if cell.setup == setup
            }
            for setup in results.setups
        },
        "training": {
            objective: {
                precision: {
                    "runs": len(runs),
                    "final_reward": over_runs([run.final_reward for run in runs], results)._asdict(),
                    "mean_reward": over_runs([run.mean_reward for run in runs], results)._asdict(),
                    "collapsed": sum(run.collapsed for run in runs),
                }
                for precision, other in results.matrix
                if other == objective and (runs := results.training_runs(precision, objective))
            }
            for objective in dict.fromkeys(objective for _, objective in results.matrix)
        },
        "deployment": deployment.as_headline(deployment.by_precision(results)),
        "claims": dict(claims),
        "missing": len(results.missing),
    }


def _of_cell(cell: MismatchCell) -> dict[str, Any]:
    return {
        **{name: cell.metric(name)._asdict() for name in _ESTIMATES},
        "cosine": {objective: cell.cosine(objective)._asdict() for objective in cell.objectives},
    }


# ----------------------------------------------------------------------------------------------------------- sentence
def sentence(results: Results) -> str:
    """What the numbers mean, for someone who sees them for the first time; nothing that they do not say."""
    pairs = [pair for setup in results.setups if (pair := _pair(results, setup))]
    if not pairs:
        return "BF16 and FP16 have not both been measured here, so there is nothing to compare yet."
    ratios = [ratio(bf16.metric("k3"), fp16.metric("k3")) for bf16, fp16 in pairs]
    apart = span(ratios, _rounded)
    if not all(one.low > 1 or one.high < 1 for one in ratios):
        return (
            f"The mismatch of trainer and engine is {apart} times as large in BF16 as in FP16, but the measurement is "
            "too small to tell this from no difference."
        )
    lengths, kept = (
        [span([pair[side].metric(name) for pair in pairs], form) for side in (0, 1)]
        for name, form in (("usable_length", _rounded), ("ess_share", percent))
    )
    return (
        f"Trainer and engine disagree {apart} times as much in BF16 as in FP16: a correction of whole responses loses "
        f"half of its samples after {lengths[0]} tokens in BF16 and after {lengths[1]} in FP16, and of the responses "
        f"sampled here it can use {kept[0]} in BF16 and {kept[1]} in FP16. In brackets: how far the "
        f"{percent(results.config.report.confidence)} intervals over problems reach."
    )


def _pair(results: Results, setup: Setup) -> tuple[MismatchCell, MismatchCell] | None:
    bf16, fp16 = results.cell(setup, "bf16"), results.cell(setup, "fp16")
    return (bf16, fp16) if bf16 and fp16 else None


def _rounded(value: float) -> str:
    return number(value, 2)


# --------------------------------------------------------------------------------------------------------------- text
def table(config: Config) -> str:
    """The headline of a finished report, and where the page is; UserError where there is none yet."""
    paths = Paths(Path(config.output))
    text = headline_text(artifacts.read_json(paths.of("headline")))
    return f"{text}\n\nThe report: {paths.of('report')}"


def headline_text(headline: Mapping[str, Any]) -> str:
    """The headline as tables for a terminal."""
    cells = [
        (setup, precision, cell)
        for setup, by_precision in sorted(headline["mismatch"].items(), key=lambda item: _natural(item[0]))
        for precision, cell in sorted(by_precision.items(), key=lambda item: _natural(item[0]))
    ]
    objectives = list(dict.fromkeys(objective for _, _, cell in cells for objective in cell["cosine"]))

    def rows(*names: str) -> list[tuple[str, ...]]:
        return [
            (setup, precision, *(_short(estimate(cell[name]), name) for name in names))
            for setup, precision, cell in cells
        ]

    lines = [
        *_aligned(
            [
                ("mismatch", "", "k3, nats a token", "ESS/N", "usable length, tokens"),
                *rows("k3", "ess_share", "usable_length"),
            ]
        ),
        "",
        *_aligned([("σ of Σd, nats", "", "seen", "by the law"), *rows("sigma", "sigma_predicted")]),
    ]
    if objectives:
        gradients = [
            (setup, precision, *(_short(estimate(cell["cosine"].get(objective))) for objective in objectives))
            for setup, precision, cell in cells
        ]
        lines += ["", *_aligned([("gradient fidelity, cosine", "", *objectives), *gradients])]
    return "\n".join([*lines, "", *textwrap.wrap(headline["sentence"], 100)])


def _short(value: Estimate, name: str = "") -> str:
    if name == "ess_share":
        value = in_percent(value)
        return f"{percent(value.value / 100, 1)} {interval(value, 3)}".rstrip()
    return f"{number(value.value)} {interval(value, 2)}".rstrip()


def _natural(name: str) -> list[tuple[int, str]]:
    """gain16 before gain120."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side: the first two flush left, the first said once, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines, before = [], ""
    for row in rows:
        first = "" if row[0] == before else row[0]
        before = row[0]
        cells = [first.ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
