"""The contract where it is hardest: killed in every step, elsewhere, through a store, and in DVC's experiments."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfmatch.steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Checkout

pytestmark = pytest.mark.workflow

RESULTS = "results/tiny"
NOT_RESULTS = ("logs", "benchmarks", "checkpoints")
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


def plan_kills(folder: Path, choice: random.Random) -> None:
    """Three kills of every step, one of them of all that runs; the first comes before any step is through its work."""
    for step in STEPS:
        whole = choice.randrange(3)
        for number, latest in enumerate((3, 12, 80)):
            kill = {
                "change": choice.randint(1, latest),
                "seconds": choice.choice((0, choice.uniform(0, 0.5))),
                "who": "all" if number == whole else "job",
            }
            (folder / f"{step}-{number}").write_text(json.dumps(kill), encoding="utf-8")


def test_killed_in_every_step_by_another_user_elsewhere_the_bytes_are_the_same(
    finished: Checkout, new_checkout: Callable[[str], Checkout], tmp_path: Path
) -> None:
    seed = os.environ.get("KILL_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"KILL_SEED={seed} plans the same kills")  # shown where the test fails
    plan_kills(tmp_path, random.Random(seed))
    checkout = new_checkout("another place")
    shutil.copyfile(Path(__file__).with_name("killing.py"), checkout.root / "src/sitecustomize.py")
    environment = checkout.environment(HOME=str(tmp_path), KILLS=str(tmp_path), **ELSEWHERE)
    command = ["snakemake", "--cores", "2", "--nolock", "--retries", "3", "--", "all"]
    ended = -signal.SIGKILL
    while ended == -signal.SIGKILL:
        ended = subprocess.run(command, cwd=checkout.root, env=environment, start_new_session=True).returncode
    assert ended == 0
    moments = {file.stem: file.read_text(encoding="utf-8") for file in tmp_path.glob("*.done")}
    assert set(moments) == {f"{step}-{number}" for step in STEPS for number in range(3)}
    assert all(moments[f"{step}-0"] != "at the end" for step in STEPS), moments
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
