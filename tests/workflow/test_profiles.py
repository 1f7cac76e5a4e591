"""The profiles for clusters, without a cluster: what they ask for, and a run through a scheduler of the test's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from halfmatch.steps import STEPS

if TYPE_CHECKING:
    from conftest import Checkout

pytestmark = pytest.mark.workflow

PROFILES = Path(__file__).parents[2] / "profiles"

# A scheduler of two scripts: a job runs as it is submitted, and its exit status is asked for afterwards.
QSUB = """\
#!/bin/sh
number=$(ls "$JOBS" | wc -l)
for script; do :; done
echo "$*" >> "$JOBS/../asked.txt"
sh "$script" > "$JOBS/../output$number.txt" 2>&1
echo $? > "$JOBS/$number"
echo $number
"""
QSTAT = """\
#!/bin/sh
echo "    job_state = F"
echo "    Exit_status = $(cat "$JOBS/$3")"
"""

# A cluster in one script: a Job runs as it is created, and its exit status is asked for afterwards.
KUBECTL = f"""\
#!{sys.executable}
import os, subprocess, sys, yaml
jobs = os.environ["JOBS"]
if sys.argv[1] == "create":
    job = yaml.safe_load(sys.stdin)
    name = job["metadata"]["generateName"] + str(len(os.listdir(jobs)))
    [container] = job["spec"]["template"]["spec"]["containers"]
    status = subprocess.run(container["command"], cwd=container["workingDir"], stdout=2).returncode
    with open(jobs + "/" + name, "w") as file:
        yaml.safe_dump({{"status": status, "job": job}}, file)
    print(name, end="")
else:
    status = yaml.safe_load(open(jobs + "/" + sys.argv[3]))["status"]
    print("/1" if status else "1/", end="")
"""


@pytest.fixture
def checkout(new_checkout: Callable[[str], Checkout]) -> Checkout:
    return new_checkout("checkout")


def planned(checkout: Checkout, *options: str) -> dict[str, str]:
    """What the first job of each rule asks for, as a dry run prints it."""
    text = checkout.run("snakemake", "-n", *options, "--", "all").stdout
    return dict(reversed(re.findall(r"^rule (\w+):$.*?^    resources: (.*?)$", text, flags=re.MULTILINE | re.DOTALL)))


def test_every_step_has_memory_and_time_in_the_slurm_profile() -> None:
    resources = yaml.safe_load((PROFILES / "slurm/config.yaml").read_text(encoding="utf-8"))["set-resources"]
    assert set(resources) == set(STEPS)
    for step, asked in resources.items():
        assert re.fullmatch(r"\d+ \* attempt", asked["mem_mb"]), step
        assert re.fullmatch(r"\d+ \* attempt", asked["runtime"]), step


def test_the_site_file_adds_account_and_partition_to_what_the_slurm_profile_asks_for(checkout: Checkout) -> None:
    asked = planned(checkout, "--profile", "profiles/slurm/site.yaml", "--workflow-profile", "profiles/slurm")
    assert "mem_mb=128000" in asked["train"]
    assert "runtime=2880" in asked["train"]
    for job in asked.values():
        assert "slurm_account=research" in job
        assert "slurm_partition=gpu" in job


def test_a_workflow_profile_that_does_not_exist_is_refused(checkout: Checkout) -> None:
    done = checkout.run("snakemake", "-n", "--workflow-profile", "profiles/slrum", check=False)
    assert done.returncode == 1
    assert "--workflow-profile profiles/slrum: there is no such profile" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_generic_cluster_runs_jobs_through_its_commands(checkout: Checkout, tmp_path: Path) -> None:
    commands, jobs = tmp_path / "commands", tmp_path / "jobs"
    commands.mkdir()
    jobs.mkdir()
    for name, text in (("qsub", QSUB), ("qstat", QSTAT)):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    profile = ["--workflow-profile", "profiles/generic-cluster"]
    assert "mem_mb=128000" in planned(checkout, *profile)["train"]
    path = f"{commands}:{checkout.environment()['PATH']}"
    options = [*profile, "--seconds-between-status-checks", "1", "--latency-wait", "5"]
    made = "results/tiny/problems/heldout.parquet"
    checkout.run("snakemake", *options, "--", made, PATH=path, JOBS=str(jobs))
    assert (checkout.root / made).is_file()
    asked = (tmp_path / "asked.txt").read_text()
    assert "-l select=1:ncpus=8:mem=64000mb:ngpus=0 -l walltime=480:00" in asked


def test_kubernetes_runs_jobs_as_jobs_of_its_own(checkout: Checkout, tmp_path: Path) -> None:
    commands, jobs = tmp_path / "commands", tmp_path / "jobs"
    commands.mkdir()
    jobs.mkdir()
    (commands / "kubectl").write_text(KUBECTL, encoding="utf-8")
    (commands / "kubectl").chmod(0o755)
    profile = ["--workflow-profile", "profiles/kubernetes"]
    assert "mem_mb=128000" in planned(checkout, *profile)["train"]
    options = [*profile, "--seconds-between-status-checks", "1", "--latency-wait", "5"]
    environment = {"PATH": f"{commands}:{checkout.environment()['PATH']}", "JOBS": str(jobs)}
    named = {"IMAGE": "python:3.11", "CLAIM": "shared", "MOUNT": str(tmp_path)}
    made = "results/tiny/problems/heldout.parquet"
    checkout.run("snakemake", *options, "--", made, **environment, **named)
    assert (checkout.root / made).is_file()
    [file] = jobs.iterdir()
    spec = yaml.safe_load(file.read_text())["job"]["spec"]
    assert spec["activeDeadlineSeconds"] == 480 * 60
    container = spec["template"]["spec"]["containers"][0]
    assert container["resources"]["requests"] == {"cpu": "8", "memory": "64000M"}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "0"
    assert spec["template"]["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
