"""Replicas of an engine in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfmatch import models
from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import Request, create, replicas
from halfmatch.errors import UserError
from halfmatch.precision import Precision

FP32 = Precision.named("fp32")
ONE = EngineSettings(slots=8)
TWO = EngineSettings(slots=8, data_parallel=2)
SAMPLING = Sampling(max_tokens=12)
REQUESTS = [Request((2, 3, 4 + index), 100 + index) for index in range(9)]


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(name="vllm", device="cuda", tensor_parallel=2, data_parallel=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert replicas._gpu_groups(settings) == ["4,5", "6,7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert replicas._gpu_groups(settings) == ["0,1", "2,3"]


def test_too_few_gpus_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(UserError, match="need 4 GPUs, and this job sees 3"):
        replicas._gpu_groups(EngineSettings(name="vllm", device="cuda", tensor_parallel=2, data_parallel=2))


@pytest.mark.slow
def test_replicas_give_what_one_engine_gives(tiny_model_folder: Path) -> None:
    single = create("transformers", tiny_model_folder, FP32, ONE)
    weights = {
        name: parameter.detach() * 1.1
        for name, parameter in models.load(tiny_model_folder, torch.float32).named_parameters()
    }
    finished: list[int] = []
    several = create("transformers", tiny_model_folder, FP32, TWO)
    try:
        assert several.dtype == "fp32"
        assert several.description == {**single.description, "data_parallel": 2}
        before = single.generate(REQUESTS, SAMPLING, stop_token_ids=[5])
        assert several.generate(REQUESTS, SAMPLING, stop_token_ids=[5], progress=finished.append) == before
        assert sum(finished) == len(REQUESTS)

        single.load_weights(weights.items())
        several.load_weights(weights.items())
        after = single.generate(REQUESTS, SAMPLING, stop_token_ids=[5])
        assert several.generate(REQUESTS, SAMPLING, stop_token_ids=[5]) == after != before

        several.sleep()
        several.wake()
        assert several.generate(REQUESTS, SAMPLING, stop_token_ids=[5]) == after

        # an error of one replica reaches the caller, and the next call is answered as if it had not been
        with pytest.raises(UserError, match="vocabulary"):
            several.generate([Request((99,), 0), *REQUESTS], SAMPLING, stop_token_ids=[5])
        assert several.generate(REQUESTS[:1], SAMPLING, stop_token_ids=[5]) == after[:1]
    finally:
        several.close()


@pytest.mark.slow
def test_a_replica_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        create("transformers", tmp_path / "nothing", FP32, TWO)
