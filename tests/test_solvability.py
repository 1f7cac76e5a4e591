"""Solve rates: counts worked out by hand, and the rule that a time-out is no try."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from halfmatch.artifacts import TABLES
from halfmatch.solvability import solve_rates


def problems(*ids: str) -> pa.Table:
    rows = [
        {"problem_id": name, "problem": f"{name}?", "answer": "1", "source": "s", "split": "train", "level": None}
        for name in ids
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["problems"].schema)


def test_counts_rates_and_the_band() -> None:
    verdicts = [
        *[("often", "correct")] * 9,
        ("often", "wrong"),
        *[("sometimes", "correct")] * 2,
        *[("sometimes", "wrong")] * 5,
        ("sometimes", "truncated"),
        *[("sometimes", "unparseable")] * 2,
        ("never", "wrong"),
    ]
    rows = {
        row["problem_id"]: row
        for row in solve_rates(problems("often", "sometimes", "never"), verdicts, low=0.2, high=0.8, confidence=0.95)
    }
    assert {name: row["kept"] for name, row in rows.items()} == {"often": False, "sometimes": True, "never": False}
    one = rows["sometimes"]
    assert (one["tries"], one["solved"], one["wrong"], one["truncated"], one["unparseable"]) == (10, 2, 5, 1, 2)
    assert one["solve_rate"] == 0.2
    # Wilson's interval of 2 of 10 at 95 %, by his formula with z = 1.959964.
    assert one["solve_rate_low"] == pytest.approx(0.0566822, abs=1e-6)
    assert one["solve_rate_high"] == pytest.approx(0.5098375, abs=1e-6)


def test_a_time_out_of_the_grader_is_counted_and_is_no_try() -> None:
    verdicts = [("a", "correct"), *[("a", "timeout")] * 4, ("a", "wrong")]
    (row,) = solve_rates(problems("a"), verdicts, low=0.2, high=0.8, confidence=0.95)
    assert (row["tries"], row["solved"], row["timeout"]) == (2, 1, 4)
    assert row["solve_rate"] == 0.5
    assert row["kept"]


@pytest.mark.parametrize("verdicts", [[], [("a", "timeout")]])
def test_a_problem_that_nobody_could_judge_is_not_kept(verdicts: list[tuple[str, str]]) -> None:
    (row,) = solve_rates(problems("a"), verdicts, low=0.0, high=1.0, confidence=0.95)
    assert row["tries"] == 0
    assert math.isnan(row["solve_rate"])
    assert not row["kept"]


def test_both_ends_of_the_band_belong_to_it() -> None:
    verdicts = [("a", "correct"), *[("a", "wrong")] * 4, ("b", "wrong"), *[("b", "correct")] * 4]
    rows = solve_rates(problems("a", "b"), verdicts, low=0.2, high=0.8, confidence=0.95)
    assert [row["kept"] for row in rows] == [True, True]
