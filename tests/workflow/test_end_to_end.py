"""Snakemake and DVC for real, on the tiny run: whole, repeated, changed, cloned, killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Checkout

pytestmark = pytest.mark.workflow

RUNS = ("bf16_grpo_seed0", "fp16_grpo_seed0")
TRIES = 5
LONG_ENOUGH = 600.0  # seconds that a wait may take before it is given up


def waiting_jobs(checkout: Checkout, *options: str) -> dict[str, int]:
    """The jobs that Snakemake would run, counted by rule."""
    text = checkout.run("snakemake", "-n", *options).stdout
    if "Job stats:" not in text:
        assert "Nothing to be done" in text
        return {}
    table = text.split("Job stats:")[1].split("total")[0].splitlines()[3:]
    return {line.split()[0]: int(line.split()[1]) for line in table if line.strip()}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != ".snakemake_timestamp"
    }


def test_a_run_leaves_every_artefact_a_log_and_a_benchmark_of_every_job(finished: Checkout) -> None:
    results = finished.root / "results/tiny"
    for run in RUNS:
        assert pq.read_table(results / f"train/{run}/log.parquet").num_rows == 12  # 6 iterations × 2 steps
        assert (results / f"train/{run}/model/model.safetensors").is_file()
        assert (results / f"logs/train/{run}.log").stat().st_size > 0
        assert (results / f"benchmarks/train/{run}.tsv").read_text().startswith("s\t")
        kept = results / f"trained_weights/{run}"
        assert {path.name for path in kept.glob("iteration-*")} == {"iteration-00000003", "iteration-00000006"}
        last, trained = kept / "iteration-00000006/model.safetensors", results / f"train/{run}/model/model.safetensors"
        assert last.read_bytes() == trained.read_bytes()
        validated = pq.read_table(results / f"validation/{run}/trainer-{run.split('_')[0]}.parquet")
        evaluated = pq.read_table(results / f"evaluation/{run}/heldout/trainer-{run.split('_')[0]}.parquet")
        assert set(validated["iteration"].to_pylist()) == {3, 6}
        at_the_end = validated.filter(pc.equal(validated["iteration"], 6)).select(evaluated.column_names)
        assert at_the_end.to_pylist() == evaluated.to_pylist()
    assert (results / "report/figures/validation.png").is_file()
    metrics = json.loads((results / "mismatch/gain48/all/transformers-bf16/bf16/mismatch.json").read_text())
    assert metrics["sequences"] == 18  # 9 products × 2
    assert metrics["provenance"]["step"] == "mismatch"
    assert (results / "report/index.html").stat().st_size > 0


def test_the_second_run_of_each_does_nothing(finished: Checkout) -> None:
    assert waiting_jobs(finished) == {}
    assert "up to date" in finished.run("dvc", "status").stdout
    again = finished.run("dvc", "repro")
    assert "Running stage" not in again.stdout + again.stderr


def test_no_artefact_says_where_or_when_it_was_made(finished: Checkout) -> None:
    folder = finished.root / "results/tiny"
    tracked = [
        file
        for name in (
            *("problems", "solvability", "mismatch", "train", "trained_weights", "evaluation", "validation", "models"),
            "report",
        )
        for file in (folder / name).rglob("*")
        if file.is_file()
    ]
    assert tracked
    for file in tracked:
        assert str(finished.root).encode() not in file.read_bytes(), file


@pytest.mark.parametrize(
    ("layer", "rules"),
    [
        ({"training": {"learning_rate": 1e-4}}, {"train": 2, "evaluate": 4, "validate": 4, "report": 1}),
        ({"grading": {"workers": 2}}, {}),
        ({"report": {"title": "Another"}}, {"report": 1}),
        ({"training": {"seeds": [0, 1]}}, {"train": 2, "evaluate": 4, "validate": 4, "report": 1}),
    ],
)
def test_a_changed_parameter_reruns_what_depends_on_it_and_no_more(
    finished: Checkout, tmp_path: Path, layer: dict[str, object], rules: dict[str, int]
) -> None:
    file = tmp_path / "layer.yaml"
    file.write_text(yaml.safe_dump(layer), encoding="utf-8")
    try:
        jobs = waiting_jobs(finished, "--configfile", "config/config.yaml", str(file), "--", "all")
    finally:
        waiting_jobs(finished)  # puts the resolved configuration back
    jobs.pop("all", None)
    assert jobs == rules


def test_a_clone_that_pulled_has_nothing_to_do(finished: Checkout, tmp_path: Path) -> None:
    store = tmp_path / "store"
    finished.run("dvc", "remote", "add", "--local", "--force", "--default", "store", str(store))
    finished.run("dvc", "push")
    finished.git("add", "dvc.lock")
    finished.git("commit", "--quiet", "--allow-empty", "--message", "Results")
    clone = type(finished)(tmp_path / "clone")
    subprocess.run(["git", "clone", "--quiet", str(finished.root), str(clone.root)], check=True)
    clone.run("dvc", "remote", "add", "--local", "--default", "store", str(store))
    clone.run("dvc", "pull")
    clone.run("halfmatch", "restore")
    assert waiting_jobs(clone) == {}
    assert "up to date" in clone.run("dvc", "status").stdout


def test_restore_refuses_results_of_another_configuration(finished: Checkout, tmp_path: Path) -> None:
    changed = type(finished)(tmp_path / "changed")
    shutil.copytree(finished.root, changed.root, symlinks=True)
    config = changed.root / "config/config.yaml"
    config.write_text(config.read_text().replace("iterations: 6", "iterations: 7"), encoding="utf-8")
    refused = changed.run("halfmatch", "restore", check=False)
    assert refused.returncode == 2
    assert "not those that dvc.lock records" in refused.stderr


def test_dvc_runs_stages_through_snakemake_to_the_same_bytes(
    finished: Checkout, new_checkout: Callable[[str], Checkout]
) -> None:
    """One training run and one measurement, with all that they need."""
    checkout = new_checkout("dvc")
    checkout.run("dvc", "repro", "train@bf16-grpo-0", "mismatch@gain16-all-transformers-bf16")
    made = digests(checkout.root / "results/tiny")
    made = {
        name: value
        for name, value in made.items()
        if name.split("/")[0] in ("problems", "models", "train", "trained_weights", "mismatch")
    }
    assert "train/bf16_grpo_seed0/model/model.safetensors" in made
    assert "trained_weights/bf16_grpo_seed0/iteration-00000003/model.safetensors" in made
    assert "mismatch/gain16/all/transformers-bf16/bf16/mismatch.json" in made
    expected = digests(finished.root / "results/tiny")
    assert made == {name: expected[name] for name in made}


@pytest.mark.parametrize("victim", ["the training process", "Snakemake and all it started"])
def test_training_that_was_killed_goes_on_from_its_checkpoint_to_the_same_bytes(
    finished: Checkout, tmp_path: Path, victim: str
) -> None:
    checkout = type(finished)(tmp_path / "killed")
    shutil.copytree(finished.root, checkout.root, symlinks=True)
    results = checkout.root / "results/tiny"
    made = [results / f"{name}/bf16_grpo_seed0" for name in ("train", "trained_weights")]
    expected = [digests(folder) for folder in made]
    assert all(expected)
    checkpoints = results / "checkpoints/bf16_grpo_seed0"
    for folder in (*made, checkpoints):
        shutil.rmtree(folder)
    target = "results/tiny/train/bf16_grpo_seed0/log.parquet"

    for _ in range(TRIES):  # a training that ends before the kill reaches it shows nothing
        running = subprocess.Popen(
            ["snakemake", "--cores", "1", "--", target],
            cwd=checkout.root,
            env=checkout.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Before the first checkpoint, as finding them takes longer than the iterations after it.
        wait_for((checkpoints / ".lock").exists, running)
        victims = training_processes(running.pid)
        wait_for(lambda: any(checkpoints.glob("iteration-*")), running)
        if victim == "the training process":
            for process in victims:
                os.kill(process, signal.SIGKILL)
            running.wait()
        else:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            checkout.run("snakemake", "--unlock")
        if not (results / "train/bf16_grpo_seed0/log.parquet").exists():
            break
        for folder in (*made, checkpoints):
            shutil.rmtree(folder)
    else:
        pytest.fail(f"{TRIES} times the training ended before it could be killed")

    checkout.run("snakemake", "--cores", "1", "--", target)
    assert [digests(folder) for folder in made] == expected


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    start = time.monotonic()
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() - start < LONG_ENOUGH
        time.sleep(0.002)


def training_processes(leader: int) -> list[int]:
    """The processes of a session that run `halfmatch train`."""
    listing = ["ps", "-ww", "-s", str(leader), "-o", "pid=,args="]  # in full width, however long the paths
    listed = subprocess.run(listing, capture_output=True, text=True, check=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "halfmatch train" in line]
