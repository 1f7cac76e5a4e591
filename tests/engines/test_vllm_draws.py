"""The trainer and the transformers engine draw with the random numbers that the real vLLM has."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import Completion, Request, create
from halfmatch.precision import Precision

pytestmark = pytest.mark.vllm

# More than there are slots: a request that waits, and slots that are filled again, take no one else's numbers.
REQUESTS = [Request((2 + index % 5, 3, 4 + index % 11), 10**15 * index + 7) for index in range(40)]
SAMPLINGS = [Sampling(max_tokens=40), Sampling(max_tokens=40, temperature=0.7, top_p=0.9)]


def responses(name: str, folder: Path, dtype: str) -> list[Completion]:
    engine = create(name, folder, Precision.named(dtype, emulate="always"), EngineSettings(slots=8, draws="race"))
    found = [engine.generate(REQUESTS, sampling, stop_token_ids=[1]) for sampling in SAMPLINGS]
    engine.close()
    return [completion for some in found for completion in some]


def same(some: list[Completion], others: list[Completion]) -> float:
    return sum(one.token_ids == other.token_ids for one, other in zip(some, others, strict=True)) / len(some)


def test_with_the_same_numbers_vllm_answers_as_the_trainer_but_for_rounding(tiny_model_folder: Path) -> None:
    vllm = {dtype: responses("vllm", tiny_model_folder, dtype) for dtype in ("fp32", "bf16")}
    assert same(vllm["fp32"], responses("trainer", tiny_model_folder, "fp32")) >= 0.95
    assert same(vllm["fp32"], responses("transformers", tiny_model_folder, "fp32")) >= 0.95
    assert 0.3 < same(vllm["bf16"], responses("trainer", tiny_model_folder, "bf16")) < 1
