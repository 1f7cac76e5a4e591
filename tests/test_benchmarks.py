"""The benchmarks that are part of what a user runs."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("gpu_check")


def test_the_gpu_check_is_of_a_model_of_a_useful_size(gpu_check: ModuleType, tmp_path: Path) -> None:
    from halfmatch import jobs
    from halfmatch.models.bootstrap import _initial

    config = gpu_check.configuration(tmp_path, tiny=False, device="cuda")
    assert jobs.model_names(config) == ["usual-logits", "large-logits"]
    with torch.device("meta"):
        model = _initial(config.models["usual-logits"].bootstrap, seed=0)
    assert 50e6 < sum(parameter.numel() for parameter in model.parameters()) < 500e6
    pairs = {(job["rollout"], job["train"]) for job in jobs.jobs(config, "fidelity")}
    assert {(one, other) for one in ("bf16", "fp16", "fp32") for other in ("bf16", "fp16", "fp32")} < pairs


def test_what_the_backward_pass_keeps_is_half_in_sixteen_bits(
    gpu_check: ModuleType, tiny_model_folder: Path, tmp_path: Path
) -> None:
    import precision_grid

    from halfmatch.precision import Precision

    config = gpu_check.configuration(tmp_path, tiny=True, device="cpu")
    kept = {}
    for dtype in ("bf16", "fp32"):
        bench = precision_grid._Bench(config, tiny_model_folder, Precision.named(dtype, emulate="always"))
        kept[dtype] = bench.kept_bytes()
        assert bench.weights_bytes() == sum(
            parameter.numel() * parameter.element_size() for parameter in bench.model.parameters()
        )
    assert 0.5 <= kept["bf16"] / kept["fp32"] < 0.8, "softmax and losses are fp32 in both"


def test_a_share_of_time_is_of_rounds_and_has_their_interval(gpu_check: ModuleType) -> None:
    import precision_grid
    from pairs import Timing

    slow, fast = (Timing("cpu", [(cpu, 9.0) for cpu in seconds]) for seconds in ((2.0, 8.0), (1.0, 2.0)))
    # ratios 2 and 4: ln 2 · (1.5 ± t / 2), of one degree of freedom
    t = 12.706205
    expected = [2.0**power for power in (1.5, 1.5 - t / 2, 1.5 + t / 2)]
    assert precision_grid.share(slow, fast, 0.95) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_gpu_check_runs_on_a_cpu_with_a_tiny_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [REPOSITORY / "scripts/gpu_check.sh", "--tiny", "--output", tmp_path / "out", "--results", tmp_path / "steps"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    folder = tmp_path / "out/cpu-tiny"
    text = (folder / "README.md").read_text(encoding="utf-8")
    for name in ("headline", "grid", "gradient-fidelity"):
        assert f"({name}.png)" in text
        assert (folder / f"{name}.png").stat().st_size > 0
    for row in ("| bf16 | fp16 |", "| fp32 | bf16 |", "| bf16-lm-head | bf16-lm-head |"):
        assert text.count(row) == 2, "once for each of the two models"


def test_the_gpu_sanity_test_trains_a_model_of_a_useful_size() -> None:
    from halfmatch import jobs
    from halfmatch.config_files import load
    from halfmatch.models.bootstrap import _initial

    config = load([REPOSITORY / "config/gpu_sanity.yaml"])
    with torch.device("meta"):
        model = _initial(config.models[config.solvability.model].bootstrap, seed=0)
    assert 30e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 100e6
    assert {run.precision for run in jobs.runs(config)} == {"bf16", "fp16"}
    demonstrated = {source.bootstrap.factors for source in config.models.values()}
    assert demonstrated == {(config.problems["all"].lowest_factor, config.problems["all"].highest_factor)}
    assert config.engine.device == "cuda"


@pytest.mark.slow
def test_the_gpu_sanity_test_runs_on_a_cpu_with_a_tiny_model(tmp_path: Path) -> None:
    results = tmp_path / "results.yaml"
    results.write_text(f"output: {tmp_path / 'steps'}\n", encoding="utf-8")
    done = subprocess.run(
        [REPOSITORY / "scripts/gpu_sanity.sh", "config/gpu_sanity-cpu.yaml", results],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    k3 = {row[0]: float(row[1].split()[0]) for row in cells if row[0] in ("bf16", "fp16")}
    assert 0 < k3["fp16"] < k3["bf16"] / 10
    runs = {row[0]: row for row in cells if row[0].endswith("_seed0")}
    assert set(runs) == {"bf16_grpo_seed0", "fp16_grpo_seed0"}
    assert all(0 <= float(row[1]) <= 1 for row in runs.values())
    assert [row[:2] for row in cells if row[0] in ("decoding", "training")] == [
        [kind, dtype] for kind in ("decoding", "training") for dtype in ("bf16", "fp16")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and the check would run on it")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([REPOSITORY / "scripts/gpu_check.sh"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "--tiny" in done.stderr
