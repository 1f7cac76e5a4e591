"""Where the answer of a response stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.grading.extraction import LONGEST_ANSWER, RULES, SEARCHED_CHARACTERS, extract, last_boxed, last_number

prose = st.text(st.characters(exclude_characters="{}\\", exclude_categories=["Cs"]), max_size=20)
content = st.recursive(
    prose, lambda inner: st.builds("{}{{{}}}{}".format, prose, inner, prose), max_leaves=4
)  # balanced braces


@given(before=prose, earlier=content, inside=content, after=prose)
def test_the_last_box_is_found_with_all_of_its_braces(before, earlier, inside, after):
    response = f"{before}\\boxed{{{earlier}}}{before}\\boxed{{{inside}}}{after}"
    assert last_boxed(response) == inside.strip()


@given(inside=content, rest=content)
def test_a_box_that_is_never_closed_is_none(inside, rest):
    assert last_boxed(f"{rest}\\boxed{{{inside}") is None
    assert last_boxed(f"\\boxed{{{inside}}}{rest}\\boxed{{{rest}") == inside.strip()


@given(response=st.text(), rule=st.sampled_from(sorted(RULES)))
def test_any_text_has_an_answer_that_stands_in_it_or_none(response, rule):
    answer = extract(response, rule)
    assert answer is None or (answer and answer in response)


@given(number=st.integers(), words=st.text("abc .", max_size=10))
def test_the_last_number_keeps_its_sign(number, words):
    assert last_number(f"12 {words} {number}{words}") == str(number)


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("1,234,567 men", "1,234,567"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("is 25.", "25"),
        ("is 2.50.", "2.50"),
        ("(-7)", "-7"),
        ("x2", "2"),
        ("$-3", "-3"),
        ("-$3.10", "-$3.10"),
        ("3/4 of it", "3/4"),
        ("٣", None),
    ],
)
def test_what_belongs_to_a_number(response, number):
    assert last_number(response) == number


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("unit", ["{", "\\boxed{", "1", "1,", "</think>", "="])
def test_fifty_megabytes_are_searched_in_a_moment(unit, rule):
    answer = extract(unit * (50_000_000 // len(unit)), rule)
    assert answer is None or len(answer) < 10


def test_an_answer_of_any_length_is_not_an_answer():
    assert extract("\\boxed{" + "1" * LONGEST_ANSWER + "}", "boxed") == "1" * LONGEST_ANSWER
    assert extract("\\boxed{" + "1" * (LONGEST_ANSWER + 1) + "}", "boxed") is None
    assert extract("=" + "1" * (LONGEST_ANSWER + 1), "exact") is None


def test_the_answer_is_searched_at_the_end_and_the_format_everywhere():
    long = "x" * SEARCHED_CHARACTERS
    assert extract(f"\\boxed{{5}}{long}", "boxed") is None
    assert extract(f"{long}\\boxed{{5}}", "boxed") == "5"
    assert extract(f"</think>{long}\\boxed{{5}}", "r1") == "5"
    assert extract(f"</think>{long}</think>\\boxed{{5}}", "r1") is None
