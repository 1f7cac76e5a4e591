"""The built-in products."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.config import ProblemSource
from halfmatch.errors import UserError
from halfmatch.problems import load


def products(split: str, seed: int = 0, **settings) -> dict[str, str]:
    rows = load(ProblemSource(source="generator", split=split, **settings), seed=seed).to_pylist()
    return {row["problem"]: row["answer"] for row in rows}


def test_all_products_of_two_to_nine():
    everything = products("all")
    assert len(everything) == 64
    assert everything["7x8"] == "56"
    assert everything["2x3"] == "06"
    assert all(len(answer) == 2 for answer in everything.values())
    assert all(int(problem[0]) * int(problem[2]) == int(answer) for problem, answer in everything.items())


def test_the_tokenizer_of_the_tiny_model_encodes_a_problem_as_its_characters():
    from halfmatch.models.tiny_tokenizer import TOKEN_IDS, make_tokenizer

    assert make_tokenizer().encode("7x8") == [TOKEN_IDS["7"], TOKEN_IDS["x"], TOKEN_IDS["8"]]


def test_products_of_larger_factors_have_one_length():
    everything = products("all", lowest_factor=7, highest_factor=12)
    assert len(everything) == 36
    assert everything["07x12"] == "0084"
    assert everything["12x12"] == "0144"
    assert {(len(problem), len(answer)) for problem, answer in everything.items()} == {(5, 4)}


@given(
    factors=st.tuples(st.integers(0, 14), st.integers(0, 14)).map(sorted),
    share=st.floats(0.1, 0.9),
    seed=st.integers(0, 1000),
)
def test_the_splits_are_disjoint_whole_and_of_the_asked_size(factors, share, seed):
    settings = {"lowest_factor": factors[0], "highest_factor": factors[1], "heldout_share": share}
    everything = products("all", **settings)
    if not 0 < round(share * len(everything)) < len(everything):
        return  # one of the splits would be empty
    train, heldout = products("train", seed, **settings), products("heldout", seed, **settings)
    assert train | heldout == everything
    assert not train.keys() & heldout.keys()
    # a pair that does not fit is left for the training split, so the last place may stay empty
    assert round(share * len(everything)) - len(heldout) in (0, 1)
    assert all("x".join(problem.split("x")[::-1]) in heldout for problem in heldout)


def test_what_is_held_out_never_moves():
    assert sorted(products("heldout", seed=7)) == sorted(products("heldout", seed=0)) == HELD_OUT


HELD_OUT = [
    "2x9",
    "3x4",
    "3x8",
    "3x9",
    "4x3",
    "4x4",
    "5x8",
    "6x7",
    "7x6",
    "7x7",
    "8x3",
    "8x5",
    "8x9",
    "9x2",
    "9x3",
    "9x8",
]


def test_a_share_of_nothing_leaves_the_training_split_whole():
    assert products("train", heldout_share=0) == products("all")


def test_an_empty_split_is_an_error_of_the_user():
    with pytest.raises(UserError, match="the split heldout has none of the 64 products"):
        products("heldout", heldout_share=0)
