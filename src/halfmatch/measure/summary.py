"""What a measurement says: a table, sentences, the same as JSON, and figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmatch import artifacts
from halfmatch.config import Config, Mismatch, Report
from halfmatch.measure.findings import HORIZONS, ess_share_after, findings, share
from halfmatch.precision import Precision
from halfmatch.report import scores
from halfmatch.report.numbers import interval, number, percent, with_interval
from halfmatch.report.results import MismatchCell, Results, Setup, estimate
from halfmatch.statistics import Estimate, ratio

WIDTH = 100
# Measurements that the table has side by side.
COLUMNS = 3


@dataclass(frozen=True)
class Cell:
    """One measurement: rollouts of one engine and dtype, scored in one dtype."""

    model: str
    engine: str
    rollout: str
    train: str
    analysis: Mapping[str, Any]  # as offline.analyse gives it
    scores: Path

    @property
    def metrics(self) -> dict[str, Estimate]:
        return {name: estimate(value) for name, value in self.analysis["metrics"].items()}

    @property
    def same_experts(self) -> Estimate | None:
        """Of a mixture of experts: the share of tokens × layers that both sides send to the same ones."""
        found = self.analysis.get("router_agreement")
        return estimate(found["share"]) if found else None

    @property
    def label(self) -> str:
        return self.rollout if self.train == self.rollout else f"{self.rollout} → {self.train}"


def write(cells: Sequence[Cell], output: Path, *, confidence: float) -> str:
    """Write measure.json, measure.txt and figures; the text."""
    text = as_text(cells, confidence)
    artifacts.write_json(
        output / "measure.json",
        {"cells": [_as_json(cell) for cell in cells], "comparison": _comparison(cells)},
        {"step": "measure", "scores": [artifacts.provenance(cell.scores) for cell in cells]},
    )
    with artifacts.atomic(output / "measure.txt", "w") as file:
        file.write(text + "\n")
    figures(cells, output / "figures", confidence=confidence)
    return f"{text}\n\nArtefacts and figures: {output}"


def as_text(cells: Sequence[Cell], confidence: float) -> str:
    """The table and what it means."""
    first = cells[0]
    lines = [f"{first.model} on {first.engine}; {percent(confidence)} intervals, resampling prompts", ""]
    lines += table(cells)
    for cell in cells:
        lines += ["", f"{cell.label}:"]
        for finding in _findings(cell):
            lines += _wrapped(finding, "  - ", "    ")
    if compared := _comparison(cells):
        lines += ["", *_wrapped(compared)]
    return "\n".join(lines)


def _wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    """Lines that keep a number and its % together."""
    lines = textwrap.wrap(
        text.replace(" %", "\N{NO-BREAK SPACE}%"), WIDTH, initial_indent=first, subsequent_indent=others
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _findings(cell: Cell) -> list[str]:
    counts = {name: cell.analysis[name] for name in ("problems", "sequences")}
    return findings(cell.metrics, **counts)


def table(cells: Sequence[Cell]) -> list[str]:
    """A row a number, with its interval, and a column a measurement; a few columns side by side, then the next."""
    lines: list[str] = []
    for start in range(0, len(cells), COLUMNS):
        columns = [_column(cell) for cell in cells[start : start + COLUMNS]]
        names = list(columns[0])
        widths = [max(map(len, names)), *(max(map(len, column.values())) for column in columns)]
        lines += [""] if lines else []
        for name in names:
            row = [name, *(column[name] for column in columns)]
            lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return lines


def _column(cell: Cell) -> dict[str, str]:
    metrics = cell.metrics
    return {
        "rollouts → scores": cell.label,
        "responses, tokens": f"{cell.analysis['sequences']:,}, {cell.analysis['tokens']:,}",
        "k3, nats a token": with_interval(metrics["k3"], 2),
        "σ of Σd, seen": with_interval(metrics["sigma"], 2),
        "σ of Σd, by the law": with_interval(metrics["sigma_predicted"], 2),
        "ESS/N, seen": share(metrics["ess_share"]),
        "ESS/N, by the law": share(metrics["ess_share_predicted"]),
        "usable length T½, tokens": with_interval(metrics["usable_length"], 2),
        **{f"ESS/N at {tokens // 1024}K tokens": share(ess_share_after(metrics["k3"], tokens)) for tokens in HORIZONS},
        **({"same experts, tokens × layers": share(cell.same_experts)} if cell.same_experts else {}),
    }


def _comparison(cells: Sequence[Cell]) -> str | None:
    """The smallest mismatch against the largest, where there are two that differ."""
    if len(cells) < 2:
        return None
    worst, best = max(cells, key=_k3), min(cells, key=_k3)
    if _k3(best) == _k3(worst):
        return None
    apart = ratio(worst.metrics["k3"], best.metrics["k3"])
    lengths = [with_interval(cell.metrics["usable_length"], 2) for cell in (worst, best)]
    return (
        f"The mismatch is smallest for {best.label} and largest for {worst.label}, by a factor of "
        f"{number(apart.value, 2)} {interval(apart, 2)}: half of the samples of a sequence-level correction are lost "
        f"after {lengths[1]} tokens instead of {lengths[0]}."
    )


def _k3(cell: Cell) -> float:
    return cell.metrics["k3"].value


def _as_json(cell: Cell) -> dict[str, Any]:
    metrics = cell.metrics
    return {
        "model": cell.model,
        "engine": cell.engine,
        "rollout": cell.rollout,
        "train": cell.train,
        **{name: cell.analysis[name] for name in ("problems", "sequences", "tokens", "confidence", "metrics")},
        **({"router_agreement": cell.analysis["router_agreement"]} if cell.same_experts else {}),
        "ess_share_after": {str(tokens): ess_share_after(metrics["k3"], tokens)._asdict() for tokens in HORIZONS},
        "findings": _findings(cell),
    }


def figures(cells: Sequence[Cell], folder: Path, *, confidence: float) -> None:
    """The panels of the report, of these measurements: colours are of the dtype that scores."""
    from halfmatch.report.figures import mismatch, sigma_law, style

    trains = list(dict.fromkeys(cell.train for cell in cells))
    precisions = {name: _precision(name) for name in trains}
    config = Config(
        precisions={**Config().precisions, **precisions},
        mismatch=Mismatch(precisions=tuple(trains)),
        report=Report(confidence=confidence),
    )
    # A row of panels a rollout dtype, where it is not the one that scores.
    crossed = any(cell.rollout != cell.train for cell in cells)
    results = Results(
        config=config,
        cells=[
            MismatchCell(
                setup=Setup(cell.model, f"{cell.rollout} rollouts" if crossed else "", cell.engine),
                rollout=cell.rollout,
                train=cell.train,
                analysis=cell.analysis,
                panels=scores.gather(cell.scores),
                fidelity=None,
            )
            for cell in cells
        ],
        crossed=[],
        runs=[],
        evaluations=[],
        perfectible=None,
        excluded={},
        missing=[],
        artefacts=[],
    )
    draws = (mismatch.tokens, mismatch.sequences, mismatch.differences, mismatch.positions, sigma_law.draw)
    with style.styled():
        for draw in draws:
            drawing = draw(results)
            style.write(style.render(drawing), drawing.name, folder)


def _precision(name: str) -> Precision:
    """A recorded measurement does not say its dtype; it is drawn as fp32 is."""
    return Precision.named(name if name in ("bf16", "fp16", "fp32") else "fp32")  # type: ignore[arg-type]
