"""The paper's values: consistent with each other, each with where it comes from."""

from __future__ import annotations

import dataclasses

import pytest

from halfmatch import paper


def every_value() -> list[object]:
    groups = (paper.SETTINGS, paper.OFFLINE_SCORES, paper.MISMATCH, paper.TRAINING, paper.GRID)
    return [value for group in groups for value in group]


def test_every_value_says_where_it_comes_from() -> None:
    for value in every_value():
        sources = dataclasses.asdict(value)["sources"]  # type: ignore[call-overload]
        assert sources, value
        assert set(sources) <= paper.SOURCES.keys(), value


def test_no_value_stands_there_twice() -> None:
    for group in (paper.OFFLINE_SCORES, paper.MISMATCH, paper.TRAINING, paper.GRID):
        assert len(set(group)) == len(group)
    assert len({(cell.train, cell.rollout) for cell in paper.GRID}) == len(paper.GRID)


def test_offline_mismatch_is_the_factor_that_the_paper_shows() -> None:
    bf16, fp16 = (paper.mismatch("kl_sequence", "offline", dtype) for dtype in ("bf16", "fp16"))
    assert bf16 is not None
    assert fp16 is not None
    assert bf16.value / fp16.value == pytest.approx(23.9, abs=0.05)


def test_offline_kl_agrees_with_the_slope() -> None:
    """KL 7.64 nats over a slope of −1.01 nats per 1,000 tokens: about 7,500 tokens, 1e-3 nats a token."""
    kl, slope = (paper.mismatch(key, "offline", "bf16") for key in ("kl_sequence", "slope_per_1k"))
    assert kl is not None
    assert slope is not None
    assert 1000 * kl.value / -slope.value == pytest.approx(7560, rel=0.01)


def test_untrained_scores_are_complete_and_close() -> None:
    by_benchmark: dict[tuple[str, int], dict[str, float]] = {}
    for score in paper.OFFLINE_SCORES:
        by_benchmark.setdefault((score.benchmark, score.budget_tokens), {})[score.dtype] = score.percent
    assert len(by_benchmark) == 4
    for percents in by_benchmark.values():
        assert percents.keys() == {"bf16", "fp16", "fp32"}
        assert max(percents.values()) - min(percents.values()) < 3


def test_fp16_trains_at_least_as_well_wherever_both_are_shown() -> None:
    runs = {peak.run for peak in paper.TRAINING}
    compared = 0
    for run in runs:
        bf16, fp16 = paper.best_training(run, "bf16"), paper.best_training(run, "fp16")
        if bf16 and fp16:
            compared += 1
            assert fp16.value > bf16.value, run
    assert compared == 12


def test_best_training_takes_the_highest_and_leaves_aime_out() -> None:
    best = paper.best_training("GRPO", "bf16")
    assert best is not None
    assert (best.value, best.step, best.framework) == (0.84, 400, "Oat")
    assert paper.best_training("grpo", "bf16") == best
    assert paper.best_training("GRPO", "fp32") is None


def test_mismatch_that_is_not_reported_is_none() -> None:
    assert paper.mismatch("kl_sequence", "offline", "fp32") is None
