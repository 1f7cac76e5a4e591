"""Responses whose verdicts were decided by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmatch.grading import Grader, Verdict

LINES = Path(__file__).with_name("golden.tsv").read_text(encoding="utf-8").splitlines()
ROWS = [[*line.split("\t"), ""][:5] for line in LINES if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str, str], Verdict]:
    """The verdicts of the whole table: one batch a rule."""
    found: dict[tuple[str, str, str], Verdict] = {}
    for rule in ("boxed", "r1", "last-number", "exact"):
        pairs = [(response, gold) for _, its_rule, response, gold, _ in ROWS if its_rule == rule]
        with Grader(rule, timeout_s=20) as grader:
            graded = grader.grade_many([(response, gold, False) for response, gold in pairs])
        found |= {(rule, *pair): verdict for pair, verdict in zip(pairs, graded, strict=True)}
    return found


@pytest.mark.parametrize(
    ("verdict", "rule", "response", "gold", "note"), ROWS, ids=lambda text: text.replace("\\", "/")
)
def test_verdict(verdict, rule, response, gold, note, verdicts):
    assert verdicts[rule, response, gold].label == verdict, note


def test_the_table_covers_what_it_should():
    assert len(ROWS) >= 200
    assert len({(rule, response, gold) for _, rule, response, gold, _ in ROWS}) == len(ROWS)
    assert {row[0] for row in ROWS} == {"correct", "wrong", "unparseable"}
