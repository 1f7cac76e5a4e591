"""The contract where it is hardest: killed in every step, elsewhere, through a store, and in DVC's experiments."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfmatch.config_files import load
from halfmatch.pipeline import Pipeline
from halfmatch.steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Checkout

pytestmark = pytest.mark.workflow

RESULTS = "results/tiny"
NOT_RESULTS = ("logs", "benchmarks", "checkpoints")
LONG_ENOUGH = 600.0  # seconds that a wait may take before it is given up
# Another person, elsewhere, in another language, on another day.
ELSEWHERE = {"USER": "someone", "LOGNAME": "someone", "TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "7"}


def digests(checkout: Checkout) -> dict[str, str]:
    """SHA-256 of every result."""
    folder = checkout.root / RESULTS
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != ".snakemake_timestamp"
        if (name := file.relative_to(folder).as_posix()).split("/")[0] not in NOT_RESULTS
    }


@dataclass(frozen=True)
class Kill:
    """A job to be killed: its step, its file, and how long after its process is there."""

    step: str
    target: str
    seconds: float


def kills(finished: Checkout) -> Iterator[Kill]:
    """One kill a step, of some job of it, before its end if it takes as long as it took before."""
    pipeline = Pipeline(load([finished.root / RESULTS / "config.yaml"]), ())
    for step in STEPS:
        choice = random.Random(step)
        if targets := pipeline.results(step):
            number = choice.randrange(len(targets))
            notes = sorted((finished.root / RESULTS / "benchmarks" / step).glob("*.tsv"))
            took = max(float(next(csv.DictReader(note.open(), delimiter="\t"))["s"]) for note in notes)
            yield Kill(step, targets[number], choice.uniform(0.1, 0.8) * took)


def processes(leader: int, step: str) -> list[int]:
    """The processes of a session that run a step."""
    listing = ["ps", "-ww", "-s", str(leader), "-o", "pid=,args="]  # in full width, however long the paths
    listed = subprocess.run(listing, capture_output=True, text=True, check=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if f"halfmatch {step} " in line]


def killed(checkout: Checkout, kill: Kill, environment: dict[str, str]) -> bool:
    """Whether the step was running when Snakemake and all that it had started were killed."""
    running = subprocess.Popen(
        ["snakemake", "--cores", "2", "--nolock", "--", kill.target],
        cwd=checkout.root,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    start = time.monotonic()
    while not (found := processes(running.pid, kill.step)) and running.poll() is None:
        assert time.monotonic() - start < LONG_ENOUGH
        time.sleep(0.02)
    time.sleep(kill.seconds)
    reached = bool(found) and running.poll() is None and bool(processes(running.pid, kill.step))
    if running.poll() is None:
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    return reached


def test_killed_in_every_step_by_another_user_elsewhere_the_bytes_are_the_same(
    finished: Checkout, new_checkout: Callable[[str], Checkout], tmp_path: Path
) -> None:
    checkout = new_checkout("another place")
    environment = checkout.environment(HOME=str(tmp_path), **ELSEWHERE)
    reached = [kill.step for kill in kills(finished) if killed(checkout, kill, environment)]
    assert len(reached) >= len(STEPS) / 2, reached
    checkout.run("snakemake", "--cores", "2", "--nolock", "--", "all", HOME=str(tmp_path), **ELSEWHERE)
    assert digests(checkout) == digests(finished)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an S3 of this process, with a bucket called store."""
    import boto3
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=address).create_bucket(Bucket="store")
    yield address
    server.stop()


def test_results_go_through_an_s3_compatible_store(finished: Checkout, s3: str, tmp_path: Path) -> None:
    for command in (
        ["remote", "add", "--local", "--force", "s3", "s3://store/halfmatch"],
        ["remote", "modify", "--local", "s3", "endpointurl", s3],
        ["push", "--remote", "s3"],
    ):
        finished.run("dvc", *command)
    other = type(finished)(tmp_path / "other")
    shutil.copytree(finished.root, other.root, symlinks=True, ignore=shutil.ignore_patterns("cache", "results"))
    other.run("dvc", "pull", "--remote", "s3")
    assert digests(other) == {name: value for name, value in digests(finished).items() if name != "config.yaml"}


@pytest.fixture
def committed(finished: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the finished run whose results are committed, as experiments want them."""
    copy = type(finished)(tmp_path / "copy")
    shutil.copytree(finished.root, copy.root, symlinks=True)
    copy.git("add", "dvc.lock")
    copy.git("commit", "--quiet", "--allow-empty", "--message", "Results")
    return copy


def test_an_experiment_runs_what_it_changes_and_its_metrics_are_compared(committed: Checkout) -> None:
    stage = "evaluate-initial@heldout-transformers-bf16"
    key = "config/config.yaml:evaluation.sampling.temperature"
    ran = committed.run("dvc", "exp", "run", stage, "--name", "colder", "-S", f"{key}=0.5")
    started = [line for line in ran.stdout.splitlines() if line.startswith("Running stage")]
    assert started == [f"Running stage '{stage}':"]
    compared = json.loads(committed.run("dvc", "metrics", "diff", "--json", "HEAD").stdout)
    assert list(compared) == [f"{RESULTS}/evaluation/initial/heldout/transformers-bf16.json"]
    shown = committed.run("dvc", "exp", "show", "--csv").stdout
    assert "colder" in shown


def test_plots_are_the_curves_of_every_run(committed: Checkout, tmp_path: Path) -> None:
    committed.run("dvc", "plots", "show", "--out", str(tmp_path / "plots"))
    page = (tmp_path / "plots/index.html").read_text(encoding="utf-8")
    for text in ("reward", "entropy", "k3", "bf16_grpo_seed0", "fp16_grpo_seed0"):
        assert text in page
