"""What the vLLM engine decides before vLLM starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from halfmatch.config import EngineSettings
from halfmatch.engines import create
from halfmatch.engines.vllm import VllmEngine
from halfmatch.engines.vllm_platform import cpu_cache_bytes
from halfmatch.errors import UserError
from halfmatch.precision import Precision


def test_the_cpu_cache_holds_all_slots_of_a_short_context() -> None:
    # 64 sequences of 512 tokens and a block of 128 for each, and vLLM's own block
    assert cpu_cache_bytes(10, 512, 64, 0.6, 10**12) == 10 * (64 * (512 + 128) + 128)


def test_the_cpu_cache_holds_one_sequence_of_a_long_context() -> None:
    assert cpu_cache_bytes(10, 131_072, 8, 0.6, 10**12) == 10 * (131_072 + 128)


def test_the_cpu_cache_is_a_share_of_the_memory_at_most() -> None:
    assert cpu_cache_bytes(46_080, 8192, 64, 0.25, 8 * 2**30) == 2 * 2**30


def test_no_vllm_is_a_clear_error(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"install halfmatch\[vllm\]"):
        create("vllm", tiny_model_folder, Precision.named("bf16"), EngineSettings(name="vllm"))


def test_modules_that_vllm_cannot_keep_in_fp32_are_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"norm.*both sides or on neither"):
        create("vllm", tiny_model_folder, Precision.named("bf16", fp32_modules=("norm",)), EngineSettings(name="vllm"))


def test_a_split_fp32_head_is_refused(tiny_model_folder: Path) -> None:
    settings = EngineSettings(name="vllm", tensor_parallel=2)
    with pytest.raises(UserError, match="tensor_parallel: 1"):
        create("vllm", tiny_model_folder, Precision.named("bf16", fp32_modules=("lm_head",)), settings)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        create("vllm", tmp_path, Precision.named("bf16"), EngineSettings(name="vllm"))


def test_a_vllm_that_draws_otherwise_than_the_configuration_says_is_refused() -> None:
    found = {"dtypes": ["bfloat16"], "head_dtype": "bfloat16", "draws": None}
    engine = object.__new__(VllmEngine)
    engine._llm, engine._fp32_head = SimpleNamespace(collective_rpc=lambda inspect: [found]), None
    with pytest.raises(UserError, match=r"engine\.draws: race: vLLM 0\.33 draws on H100 by a kernel of its own"):
        engine._describe("0.33", "H100", Precision.named("bf16"), EngineSettings(name="vllm", draws="race"))
