from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.rl.batching import collate, join, micro_batches, pad, rank_shares, response_mask

EOS = 1
token_lists = st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=6)


def test_response_mask_keeps_the_stop_token_and_drops_what_follows():
    mask, truncated = response_mask([[5, EOS, 7, EOS], [5, 6, 7], [EOS], []], {EOS})
    assert mask.int().tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert truncated.tolist() == [False, True, False, True]


@given(token_lists)
def test_mask_and_truncation_agree(rows):
    mask, truncated = response_mask(rows, {EOS})
    for row, counted, cut in zip(rows, mask.sum(1).tolist(), truncated.tolist(), strict=True):
        kept = row[:counted]
        assert cut == (EOS not in row)
        assert kept.count(EOS) == (0 if cut else 1)
        assert kept == row if cut else kept[-1] == EOS


def test_joined_batches_are_the_batch_of_all_rows():
    prompts, responses = [[2, 3], [4], [5, 6, 7]], [[5, EOS], [6], [8, 9, 9, EOS]]
    routing = [torch.arange(2 * 3 * 2).view(2, 3, 1, 2), torch.arange(6 * 2).view(1, 6, 1, 2)]
    parts = [collate(prompts[:2], responses[:2], {EOS}), collate(prompts[2:], responses[2:], {EOS})]
    joined = join([replace(part, routing=experts) for part, experts in zip(parts, routing, strict=True)])
    whole = collate(prompts, responses, {EOS})
    for name in ("input_ids", "prompt_lengths", "response_mask", "truncated"):
        assert torch.equal(getattr(joined, name), getattr(whole, name))
    assert joined.routing.shape == (3, 6, 1, 2)
    assert torch.equal(joined.routing[:2, :3], routing[0])
    assert not joined.routing[:2, 3:].any()
    assert torch.equal(joined.routing[2:], routing[1])
    assert join(parts).routing is None


def test_collate_lays_rows_out_from_the_left():
    batch = collate([[2, 3], [4]], [[5, EOS, 9], [6, 7, 8]], {EOS})
    assert batch.input_ids.tolist() == [[2, 3, 5, EOS], [4, 6, 7, 8]]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.response_mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.lengths.tolist() == [4, 4]
    assert batch.truncated.tolist() == [False, True]


def test_collate_refuses_an_empty_prompt_and_uneven_lists():
    with pytest.raises(ValueError, match="empty prompt"):
        collate([[]], [[1]], {EOS})
    with pytest.raises(ValueError, match="2 prompts for 1 responses"):
        collate([[1], [2]], [[1]], {EOS})


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), min_size=1, max_size=5), st.lists(st.integers(0, 4), min_size=1, max_size=9)
        ),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_selecting_rows_equals_collating_them(rows, data):
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True))
    whole = collate(*zip(*rows, strict=True), {EOS})
    part = whole.select(torch.tensor(order))
    expected = collate(*zip(*(rows[row] for row in order), strict=True), {EOS})
    for name in ("input_ids", "prompt_lengths", "response_mask", "truncated"):
        assert torch.equal(getattr(part, name), getattr(expected, name)), name


def test_pad_leaves_zeros_behind_the_mask():
    mask = torch.tensor([[True, True], [True, False]])
    assert pad([[-1.0, -2.0, -9.0], [-3.0]], mask).tolist() == [[-1.0, -2.0], [-3.0, 0.0]]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_micro_batches_cover_every_row_once_within_the_budget(lengths, budget):
    groups = [group.tolist() for group in micro_batches(lengths, budget)]
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or sum(lengths[row] for row in group) <= budget
    assert groups == [group.tolist() for group in micro_batches(lengths, budget)]


def test_micro_batches_put_similar_lengths_together():
    assert [group.tolist() for group in micro_batches([3, 9, 3, 10, 6], 20)] == [[3, 1], [4, 0, 2]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), budget=st.integers(1, 120), ranks=st.integers(1, 6)
)
def test_shares_of_ranks_hold_every_row_once_in_as_many_micro_batches(lengths, budget, ranks):
    shares = rank_shares(lengths, budget, ranks)
    assert len(shares) == ranks
    assert sorted(row for share in shares for group in share for row in group.tolist()) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1
    for share in shares:
        for group in share:
            rows = group.tolist()
            assert len(rows) < 2 or sum(lengths[row] for row in rows) <= budget
    tokens = [sum(lengths[row] for group in share for row in group.tolist()) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)  # what the longest row first, to the emptiest rank, guarantees


def test_one_rank_has_the_micro_batches_of_all_rows():
    lengths = [5, 9, 9, 2, 7, 30, 1]
    (share,) = rank_shares(lengths, 20, 1)
    assert [group.tolist() for group in share] == [group.tolist() for group in micro_batches(lengths, 20)]
