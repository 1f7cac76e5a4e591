"""Rows that do not become problems are counted and named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.config import ProblemSource
from halfmatch.errors import UserError
from halfmatch.problems import identify, load, load_with_excluded, summary
from halfmatch.problems.screening import screen
from halfmatch.problems.sources import Row


def rows(*pairs: tuple[str, str]) -> list[Row]:
    return [Row(number, problem, answer) for number, (problem, answer) in enumerate(pairs)]


def reasons(*pairs: tuple[str, str], rule=None) -> dict[int, str]:
    kept, excluded = screen(rows(*pairs), rule)
    found = {row["row"]: row["reason"] for row in excluded}
    assert sorted([row.number for row in kept] + list(found)) == list(range(len(pairs)))
    return found


def test_rows_without_problem_or_answer():
    assert reasons(("1+1", "2"), ("", "2"), (" \n", "2"), ("1+2", "")) == {
        1: "empty problem",
        2: "empty problem",
        3: "empty answer",
    }


def test_repeated_rows_keep_the_first():
    assert reasons(("1+1", "2"), ("1+2", "3"), ("1+1", "2"), ("1 +\n 1", "2"), ("1+1 ", "2")) == {
        2: "repeated: the same as row 0",
        4: "repeated: the same as row 0",
    }


def test_of_conflicting_rows_none_is_kept_and_all_are_named():
    conflict = "conflicting answers: '2' in row 0, '3' in row 2, '2' in row 3"
    assert reasons(("1+1", "2"), ("1+2", "3"), ("1+1", "3"), ("1+1", "2")) == {0: conflict, 2: conflict, 3: conflict}


def test_leading_zeros_make_another_answer():
    assert set(reasons(("1+1", "02"), ("1+1", "2"))) == {0, 1}


def test_answers_that_the_rule_cannot_read_are_left_out_where_asked():
    pairs = [("a", "\\frac{1}{2}"), ("b", "\\undefined{2}"), ("c", "\\text{Evelyn}"), ("d", "(1,2")]
    assert reasons(*pairs) == {}
    assert reasons(*pairs, rule="exact") == {}
    assert reasons(*pairs, rule="boxed") == {
        1: "unreadable answer: '\\\\undefined{2}' under the rule boxed",
        3: "unreadable answer: '(1,2' under the rule boxed",
    }


def test_the_summary_counts_kinds_of_reasons():
    _, excluded = screen(rows(("a", "1"), ("a", "1"), ("a", "1"), ("b", ""), ("c", "1"), ("c", "2")), None)
    assert summary(excluded) == "2 repeated, 2 conflicting answers, 1 empty answer"
    assert summary([]) == "none"


problem_rows = st.lists(
    st.tuples(st.sampled_from(["", "p", "q", "r", "s "]), st.sampled_from(["", "1", "2"])), max_size=9
)


@given(pairs=problem_rows)
def test_every_row_is_a_problem_or_is_named_and_no_problem_comes_twice(pairs):
    kept, excluded = screen(rows(*pairs), None)
    assert sorted([row.number for row in kept] + [row["row"] for row in excluded]) == list(range(len(pairs)))
    assert len({row.problem for row in kept}) == len(kept)
    assert all(row.problem.strip() and row.answer for row in kept)


# ----------------------------------------------------------------------------------------------- identity and sample
def test_the_identity_is_of_the_content():
    # sha256 of the JSON text ["1+1", "2"], worked out with sha256sum
    assert identify("1+1", "2") == "645b6bf44b44b997"
    assert len({identify("1+1", "2"), identify("1+1", "02"), identify("1+1 ", "2"), identify('1+1", "2', "")}) == 4


def write(folder, content: str) -> ProblemSource:
    (folder / "set.csv").write_text(content, encoding="utf-8")
    return ProblemSource(source="file", path=str(folder / "set.csv"))


def test_the_table_has_the_declared_schema_and_order(tmp_path):
    from halfmatch.artifacts import TABLES

    table, excluded = load_with_excluded(write(tmp_path, "problem,answer\n1+1,2\n2+2,4\n,5\n3+3,6\n"))
    assert table.schema.equals(TABLES["problems"].schema)
    assert table["problem_id"].to_pylist() == sorted(identify(f"{i}+{i}", str(2 * i)) for i in (1, 2, 3))
    assert set(table["source"].to_pylist()) == {"set.csv"}
    assert excluded == [{"row": 2, "reason": "empty problem", "problem": ""}]


def test_a_source_without_any_problem_says_why(tmp_path):
    with pytest.raises(UserError, match=r"set\.csv: no row is a problem; left out: 2 empty answer"):
        load(write(tmp_path, "problem,answer\n1+1,\n2+2,\n"))


def sampled(folder, order: list[int], sample: int, seed: int = 0) -> list[str]:
    spec = write(folder, "problem,answer\n" + "".join(f"{i}+{i},{2 * i}\n" for i in order))
    return load(spec.model_copy(update={"sample": sample}), seed=seed)["problem"].to_pylist()


def test_a_sample_depends_on_the_content_and_the_seed_alone(tmp_path):
    order = list(range(40))
    chosen = sampled(tmp_path, order, 10)
    assert len(set(chosen)) == 10
    assert sampled(tmp_path, order[::-1], 10) == chosen
    assert sampled(tmp_path, order, 10, seed=1) != chosen
    assert set(sampled(tmp_path, order, 5)) < set(chosen)
    # one more problem takes at most one place
    assert len(set(sampled(tmp_path, [*order, 99], 10)) & set(chosen)) >= 9


def test_a_sample_larger_than_the_source_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"set\.csv: sample asks for 4 problems, and there are 3"):
        sampled(tmp_path, [1, 2, 3], 4)
