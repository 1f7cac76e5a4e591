"""What a machine lacks for a configuration, on machines that are made up; and the one we are on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfmatch import cli
from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.doctor import GIB, Machine, missing_parts, usage

LAPTOP = Machine("a laptop", 2, 16 * GIB, 100 * GIB, frozenset({"f16c"}), ())
SERVER = Machine("a server", 64, 512 * GIB, 10_000 * GIB, frozenset(), ("NVIDIA H100, 81559 MiB, 560.1",) * 2)
WITH_VLLM = {"torch": "2", "dvc": "3", "vllm": "0.33"}


def config(**changes: Any) -> Config:
    return validate(changes, "")


def needed(given: Config, machine: Machine, installed: dict[str, str]) -> list[str]:
    return [part.what for part in missing_parts(given, machine, installed) if part.needed]


def test_a_laptop_lacks_nothing_for_the_laptop_run() -> None:
    assert needed(Config(), LAPTOP, {"torch": "2", "dvc": "3"}) == []


@pytest.mark.parametrize("section", ["mismatch", "evaluation"])
def test_vllm_is_needed_where_any_step_asks_for_it(section: str) -> None:
    wants = config(**{section: {"engines": ["vllm"]}})
    assert needed(wants, LAPTOP, {"dvc": "3"}) == ["vLLM"]
    assert needed(wants, LAPTOP, WITH_VLLM) == []
    (vllm,) = (part for part in missing_parts(wants, LAPTOP, {"dvc": "3"}) if part.what == "vLLM")
    assert "cpu-vllm.lock" in vllm.remedy


def test_gpus_are_counted() -> None:
    wants = config(engine={"name": "vllm", "device": "cuda", "tensor_parallel": 4})
    assert needed(wants, SERVER, WITH_VLLM) == ["4 GPUs (engine.device: cuda), 2 here"]
    assert needed(config(engine={"name": "vllm", "device": "cuda", "tensor_parallel": 2}), SERVER, WITH_VLLM) == []


def test_files_and_packages_that_are_not_there_are_named(tmp_path: Path) -> None:
    models = {
        "m": {"source": "gguf", "package": "no-such-package-of-weights"},
        "n": {"source": "folder", "path": str(tmp_path / "none")},
    }
    problems = {name: {"source": "generator", "split": name} for name in ("all", "train", "heldout")}
    wants = config(
        models=models,
        problems={**problems, "p": {"source": "file", "path": str(tmp_path / "p.jsonl")}},
        solvability={"model": "m"},
        mismatch={"models": ["m"]},
    )
    assert needed(wants, LAPTOP, WITH_VLLM) == ["models.m", "models.n", "problems.p"]


def test_usage_says_what_is_emulated() -> None:
    lines = list(usage(Config()))
    assert "precision bf16 on cpu: trainer bf16 (emulated), engine bf16 (emulated)" in lines
    assert "precision fp32 on cpu: trainer fp32, engine fp32" in lines


def test_doctor_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("cores", "GiB of memory", "torch", "16-bit matmul units", "solvability: engine transformers"):
        assert part in text


def test_doctor_ends_in_exit_2_where_something_needed_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("engine: {name: vllm, device: cuda, tensor_parallel: 64}\n", encoding="utf-8")
    assert cli.main(["doctor", "--config", str(tmp_path / "a.yaml")]) == 2
    message = capsys.readouterr().err  # vLLM as well, where it is not installed
    assert "needs what is missing here" in message
    assert "64 GPUs" in message
