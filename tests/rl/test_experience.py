"""How rows are dealt out to gradient steps: all of them once, what stays together in one micro-batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.rl.batching import collate
from halfmatch.rl.experience import compute_rows, plan_steps
from halfmatch.rl.ranks import ALONE, Ranks

lengths_of_pairs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=9)


def test_every_step_sees_every_problem_and_every_response_has_one_step():
    plans = plan_steps(torch.arange(12)[:, None], torch.full((12,), 3), steps=2, budget=8, ranks=ALONE)
    steps = [plan.rows.tolist() for plan in plans]
    assert sorted(row for step in steps for row in step) == list(range(12))
    assert [sorted({row // 4 for row in step}) for step in steps] == [[0, 1, 2], [0, 1, 2]]
    assert [torch.cat(plan.micro_batches).tolist() for plan in plans] == steps
    assert {len(rows) for plan in plans for rows in plan.micro_batches} == {2}


def test_neighbours_go_to_different_steps():
    plans = plan_steps(torch.arange(6)[:, None], torch.ones(6), steps=2, budget=99, ranks=ALONE)
    assert [plan.rows.tolist() for plan in plans] == [[0, 2, 4], [1, 3, 5]]
    pairs = torch.tensor([[0, 3], [5, 4], [1, 2]])
    plans = plan_steps(pairs, torch.ones(6), steps=2, budget=99, ranks=ALONE)
    assert [plan.rows.tolist() for plan in plans] == [[0, 3, 1, 2], [5, 4]]


@given(lengths_of_pairs, st.integers(1, 60), st.integers(1, 4), st.integers(1, 3))
def test_every_pair_is_whole_in_one_micro_batch_of_one_rank(lengths, budget, steps, size):
    flat = torch.tensor([length for pair in lengths for length in pair], dtype=torch.int64)
    pairs = torch.arange(len(flat)).view(-1, 2)
    of_ranks = [plan_steps(pairs, flat, steps=steps, budget=budget, ranks=Ranks(rank, size)) for rank in range(size)]
    found = []
    for plans in zip(*of_ranks, strict=True):
        computed = [group.view(-1, 2) for plan in plans for group in plan.micro_batches]
        assert len({len(plan.micro_batches) for plan in plans}) == 1
        for plan in plans:
            assert torch.equal(plan.rows, plans[0].rows)
        step = sorted(pair for group in computed for pair in group.tolist())
        assert step == sorted(plans[0].rows.view(-1, 2).tolist())
        found += step
        for group in computed:
            assert len(group) < 2 or flat[group].sum() <= budget
    assert sorted(found) == pairs.tolist()
    assert len(of_ranks[0]) == max(1, min(steps, len(pairs)))


def test_without_a_pair_there_is_one_step_of_nothing():
    (plan,) = plan_steps(torch.zeros(0, 2, dtype=torch.int64), torch.ones(4), steps=3, budget=9, ranks=ALONE)
    assert len(plan.rows) == len(plan.micro_batches) == 0


def test_an_empty_micro_batch_takes_part_in_the_backward_pass_and_adds_nothing():
    batch = collate([[2, 3], [4]], [[5, 6, 1], [7, 1]], {1})
    weight = torch.nn.Parameter(torch.tensor(3.0))
    seen = []

    def compute(micro):
        seen.append(micro.input_ids.tolist())
        return weight * micro.response_mask, micro.response_mask.float()

    scaled, plain = compute_rows(compute, batch, torch.tensor([], dtype=torch.int64))
    assert seen == [[[4, 7, 1]]]  # the shortest
    assert scaled.shape == plain.shape == (0, 2)
    scaled.sum().backward()
    assert weight.grad == 0  # and not None, for which other ranks would wait

    scaled, _ = compute_rows(compute, batch, torch.tensor([1, 0]))
    assert scaled.tolist() == [[3, 3, 0], [3, 3, 3]]
