"""The probe of both sides after a sync, with an engine of known log-probs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from halfmatch.engines import Completion, Request
from halfmatch.engines.probe import PROMPT_TOKENS, RESPONSE_TOKENS, Probe, probe, probe_requests


@dataclass
class FixedEngine:
    """Samples token 7 with the given log-probs, whatever is asked."""

    logprobs: list[float]
    asked: list[Any] = field(default_factory=list)

    def generate(self, requests: Any, sampling: Any, *, stop_token_ids: Any, progress: Any = None) -> list[Completion]:
        self.asked.append((sampling.max_tokens, sampling.temperature, sampling.top_p, tuple(stop_token_ids)))
        return [Completion([7] * len(self.logprobs), self.logprobs, "length") for _ in requests]


REQUESTS = [Request((1, 2), 0), Request((1, 3), 1)]


def test_the_difference_is_that_of_the_same_tokens() -> None:
    engine = FixedEngine([-1.0, -2.0])

    def score(prompts: list[list[int]], responses: list[list[int]]) -> list[np.ndarray]:
        assert prompts == [[1, 2], [1, 3]]
        assert responses == [[7, 7], [7, 7]]
        return [np.float32([-1.5, -2.0]), np.float32([-0.75, -2.0])]

    # d is -0.5, 0, 0.25, 0
    found = probe(engine, score, REQUESTS)
    assert found.tokens == 4
    assert found.mean_abs == pytest.approx(0.1875)
    assert found.max_abs == 0.5
    assert found.k3 == pytest.approx((np.exp(-0.5) - 1 + 0.5 + np.exp(0.25) - 1 - 0.25) / 4)
    assert engine.asked == [(RESPONSE_TOKENS, 1.0, 1.0, ())]


def test_equal_sides_differ_by_nothing() -> None:
    found = probe(FixedEngine([-1.0, -2.0]), lambda _, responses: [np.array([-1.0, -2.0])] * 2, REQUESTS)
    assert found == Probe(4, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("broken", [np.nan, -np.inf])
def test_what_is_not_finite_is_infinitely_far(broken: float) -> None:
    found = probe(FixedEngine([-1.0]), lambda _, responses: [np.array([-1.0]), np.array([broken])], REQUESTS)
    assert found == Probe(2, np.inf, np.inf, np.inf)


def test_a_side_that_scores_other_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 tokens were sampled and 3 scored"):
        probe(FixedEngine([-1.0]), lambda _, responses: [np.zeros(1), np.zeros(2)], REQUESTS)


def test_the_prompts_are_fixed_and_share_all_but_their_last_token() -> None:
    requests = probe_requests(50_000, 8192)
    assert requests == probe_requests(50_000, 8192)
    assert {len(request.prompt_ids) for request in requests} == {PROMPT_TOKENS}
    assert len({request.prompt_ids[:-1] for request in requests}) == 1
    assert len({request.seed for request in requests}) == len(requests)


def test_the_prompts_fit_a_small_model() -> None:
    requests = probe_requests(20, 80)
    assert {len(request.prompt_ids) + RESPONSE_TOKENS for request in requests} == {80}
    assert all(0 <= token < 20 for request in requests for token in request.prompt_ids)
    with pytest.raises(ValueError, match="no room"):
        probe_requests(20, RESPONSE_TOKENS)
