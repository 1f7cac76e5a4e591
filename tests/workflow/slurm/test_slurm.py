"""profiles/slurm on a Slurm: the pipeline, a GPU, a job that fails once, a job that takes too long, and DVC."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from halfmatch.config_files import load
from halfmatch.stages import to_dvc_yaml

if TYPE_CHECKING:
    from conftest import Checkout

pytestmark = pytest.mark.slurm

HERE = Path(__file__).parent
PROFILE = HERE.parents[2] / "profiles/slurm"
TINY = HERE.parent / "tiny.yaml"
# The shortest way through every step that the tiny run has.
LAYER = {
    "solvability": {"model": "gain16"},
    "mismatch": {
        "models": ["gain16"],
        "precisions": ["bf16"],
        "gradient_fidelity": {"enabled": False},
        "origin": {"enabled": False},
    },
    # Two nodes with a rank each, which srun starts and which meet on the first.
    "training": {"precisions": ["bf16"], "iterations": 2, "keep_weights_every": None, "ranks": 2, "nodes": 2},
}
# Its Slurm jobs: the two shards of solve rates share one.
JOBS = {
    "problems": 2,
    "model": 1,
    "shards": 1,
    "perfectible": 1,
    "rollouts": 1,
    "scores": 1,
    "mismatch": 1,
    "train": 1,
    "evaluate": 4,
    "report": 1,
}


@dataclass(frozen=True)
class Job:
    """A job that Slurm has seen, and what it was granted."""

    comment: str
    state: str
    memory: str
    time_limit: str
    cores: str


@dataclass(frozen=True)
class Cases:
    """A run of cases.smk that has begun: while it waits for a time limit, other tests go on."""

    folder: Path
    process: subprocess.Popen[bytes]

    def messages(self) -> str:
        """What Snakemake said, once it has ended."""
        self.process.wait()
        return (self.folder / "messages.txt").read_text(encoding="utf-8")


def options(site: Path) -> list[str]:
    return ["--profile", str(site), "--workflow-profile", str(PROFILE), "--latency-wait", "10"]


def slurm_jobs(folder: Path) -> list[Job]:
    """The jobs that were submitted in a folder, in their order."""
    command = ["squeue", "--noheader", "--states=all", "--sort=i", "--format=%Z|%k|%T|%m|%l|%C"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [Job(*fields[1:]) for fields in (line.split("|") for line in lines) if fields[0] == str(folder)]


@pytest.fixture(scope="session", autouse=True)
def cases(slurm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    folder = tmp_path_factory.mktemp("cases")
    shutil.copyfile(HERE / "cases.smk", folder / "Snakefile")
    with (folder / "messages.txt").open("w") as messages:
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "snakemake", *options(slurm)]
        process = subprocess.Popen(command, cwd=folder, stdout=messages, stderr=messages)
    yield Cases(folder, process)
    process.terminate()
    process.wait()


@pytest.fixture(scope="session")
def pipeline(slurm: Path, new_checkout: Callable[[str], Checkout]) -> Checkout:
    """A checkout in which the whole pipeline ran as Slurm jobs."""
    checkout = new_checkout("pipeline")
    layer = checkout.root / "layer.yaml"
    layer.write_text(yaml.safe_dump(LAYER), encoding="utf-8")
    written = checkout.run("halfmatch", "config", "--config", str(TINY), str(layer)).stdout
    (checkout.root / "config/config.yaml").write_text(written, encoding="utf-8")
    (checkout.root / "dvc.yaml").write_text(to_dvc_yaml(load([TINY, layer])), encoding="utf-8")
    checkout.run("snakemake", *options(slurm), "--group-components", "shards=2", "--", "all", OMP_NUM_THREADS="1")
    return checkout


def test_the_pipeline_runs_as_one_slurm_job_a_part_and_shards_share_one(pipeline: Checkout) -> None:
    jobs = slurm_jobs(pipeline.root)
    assert {job.state for job in jobs} == {"COMPLETED"}
    assert Counter(re.split(r"[_:]", job.comment)[1] for job in jobs) == JOBS
    assert (pipeline.root / "results/tiny/report/index.html").stat().st_size > 0
    assert "Nothing to be done" in pipeline.run("snakemake", "-n", "--", "all").stdout


def test_the_page_on_clusters_can_be_followed_word_by_word(pipeline: Checkout, slurm: Path, tmp_path: Path) -> None:
    """From the site file on. The run is the tiny one, which is done; of the stages one is run, as a Slurm job."""
    page = (pipeline.root / "docs/cluster.md").read_text(encoding="utf-8").split("## Other schedulers")[0]
    _, copy, look, run, stages = re.findall(r"^ *```\n(.*?)^ *```$", page, flags=re.MULTILINE | re.DOTALL)
    made = pipeline.root / "results/tiny/problems/heldout.parquet"
    expected, before = made.read_bytes(), len(slurm_jobs(pipeline.root))

    def follow(commands: str) -> str:
        return pipeline.run("bash", "-euxo", "pipefail", "-c", commands, HOME=str(tmp_path)).stdout

    follow(copy)
    shutil.copyfile(slurm, tmp_path / "site.yaml")
    assert re.search(r"^train +12$", follow(look), flags=re.MULTILINE)
    follow(run.replace("config/paper.yaml", "config/config.yaml"))
    assert len(slurm_jobs(pipeline.root)) == before
    follow(f"{stages.strip()} problems-heldout")
    assert len(slurm_jobs(pipeline.root)) == before + 1
    assert made.read_bytes() == expected


def test_a_job_that_asks_for_a_gpu_gets_one(cases: Cases) -> None:
    cases.messages()
    granted = (cases.folder / "gpu.txt").read_text()
    assert re.match(r"CUDA_VISIBLE_DEVICES=[01]\n", granted)
    assert "gres:gpu:1" in granted


def test_a_job_that_failed_is_run_again_with_more_memory_and_time(cases: Cases) -> None:
    cases.messages()
    first, second = ((cases.folder / f"granted{number}.txt").read_text() for number in (1, 2))
    assert "MinMemoryNode=16000M" in first
    assert "TimeLimit=01:00:00" in first
    assert "MinMemoryNode=32000M" in second
    assert "TimeLimit=02:00:00" in second
    assert (cases.folder / "again.txt").exists()


def test_a_job_that_its_time_limit_ended_is_named(cases: Cases) -> None:
    messages = cases.messages()
    assert cases.process.returncode == 1
    assert "Error in rule endless" in messages
    assert "TIMEOUT" in messages
    assert not (cases.folder / "late.txt").exists()
    assert [job.state for job in slurm_jobs(cases.folder) if "endless" in job.comment] == ["TIMEOUT"]
