"""Sets of problems: the built-in products, local files, datasets of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from halfmatch.artifacts import TABLES
from halfmatch.config import GradingRule, ProblemSource
from halfmatch.errors import UserError
from halfmatch.problems import generator, sources
from halfmatch.problems.screening import screen, summary

__all__ = ["identify", "load", "load_with_excluded", "summary"]


def identify(problem: str, answer: str) -> str:
    """The name of a problem: 64 bits of the SHA-256 of its text and answer, so it is the same in every source."""
    return hashlib.sha256(json.dumps([problem, answer], ensure_ascii=False).encode()).hexdigest()[:16]


def load(spec: ProblemSource, *, seed: int = 0, rule: GradingRule | None = None) -> pa.Table:
    """The problems of a source, as the table "problems", sorted by problem_id; see `load_with_excluded`."""
    return load_with_excluded(spec, seed=seed, rule=rule)[0]


def load_with_excluded(
    spec: ProblemSource, *, seed: int = 0, rule: GradingRule | None = None
) -> tuple[pa.Table, list[dict[str, Any]]]:
    """The problems of a source, and the rows of it that did not become problems (table "excluded").

    seed: chooses the problems where `spec.sample` asks for some of them. rule: leave out problems whose answer nothing
    can be compared with under this rule of grading. What cannot be read raises UserError.
    """
    rows = generator.read(spec) if spec.source == "generator" else sources.read(spec)
    kept, excluded = screen(rows, rule)
    if not kept:
        raise UserError(f"{_name(spec)}: no row is a problem; left out: {summary(excluded)}")
    problems = {identify(row.problem, row.answer): row for row in kept}
    table = [
        {
            "problem_id": problem_id,
            "problem": problems[problem_id].problem,
            "answer": problems[problem_id].answer,
            "source": _name(spec),
            "split": "all" if spec.source == "file" else spec.split,
            "level": problems[problem_id].level,
        }
        for problem_id in sorted(_sample(list(problems), spec, seed))
    ]
    return pa.Table.from_pylist(table, schema=TABLES["problems"].schema), excluded


def _name(spec: ProblemSource) -> str:
    """Where problems come from, without the folder that a file lies in: artefacts hold no paths."""
    if spec.source == "generator":
        return f"products of {spec.lowest_factor} to {spec.highest_factor}"
    return f"{spec.id}@{spec.revision}" if spec.source == "hub" else Path(str(spec.path)).name


def _sample(problem_ids: list[str], spec: ProblemSource, seed: int) -> list[str]:
    """The problems that `spec.sample` asks for: those whose hash with the seed is lowest, whatever their order."""
    if spec.sample is None:
        return problem_ids
    if spec.sample > len(problem_ids):
        raise UserError(f"{_name(spec)}: sample asks for {spec.sample} problems, and there are {len(problem_ids)}")
    return sorted(problem_ids, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())[: spec.sample]
