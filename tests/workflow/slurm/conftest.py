"""A Slurm of two nodes, both of them this machine, each with two GPUs that are character devices."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

# Job steps read the configuration from here, whatever SLURM_CONF says.
INSTALLED = Path("/etc/slurm")
FILES = ("slurm.conf", "gres.conf")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
LONG_ENOUGH = 60.0  # seconds that a daemon may take to start, or jobs to end, on a busy machine

SITE = """\
# Of a machine without accounts, whose scheduler is asked at once and often.
slurm-status-command: squeue
slurm-init-seconds-before-status-checks: 2
seconds-between-status-checks: 2
default-resources:
  slurm_partition: tests
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running Slurm, and the site settings that a run of Snakemake on it needs."""
    if missing := [name for name in NEEDED if not shutil.which(name)]:
        pytest.skip(f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm")
    if any((INSTALLED / name).exists() and not (INSTALLED / name).is_symlink() for name in FILES):
        pytest.skip(f"this machine has a Slurm of its own, with its configuration in {INSTALLED}")
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        configure(folder)
        stack.enter_context(installed(folder))
        munge = ["--socket", "munge.socket", "--key-file", "munge.key", "--pid-file", "munge.pid"]
        munge += ["--seed-file", "munge.seed", "--log-file", "munge.log"]
        paths = [argument if argument.startswith("--") else str(folder / argument) for argument in munge]
        stack.enter_context(daemon(folder, "munge", "munged", "--foreground", "--force", *paths))
        wait_for(lambda: (folder / "munge.socket").exists(), folder)
        stack.enter_context(daemon(folder, "controller", "slurmctld", "-D"))
        for node in nodes():
            stack.enter_context(daemon(folder, node, "slurmd", "-D", "-N", node))
        wait_for(lambda: output("sinfo", "--noheader", "--format=%T") == "idle", folder)
        stack.callback(end_all_jobs, folder)
        site = folder / "site.yaml"
        site.write_text(SITE, encoding="utf-8")
        yield site


def configure(folder: Path) -> None:
    """Write the configuration. The nodes claim more than there is, so that jobs may ask for what the profile says."""
    host, names = nodes()[0], ",".join(nodes())
    port, *ports = free_ports(1 + len(nodes()))
    lines = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        for name, port in zip(nodes(), ports, strict=True)
    )
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for number in range(2):
        os.mknod(folder / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={folder}/gpu[0-1]\n", encoding="utf-8")
    (folder / "slurm.conf").write_text(
        f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
MinJobAge=3600
KillWait=2
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=64 RealMemory=1000000 Gres=gpu:2
{lines}
PartitionName=tests Nodes={names} Default=YES MaxTime=INFINITE State=UP
""",
        encoding="utf-8",
    )
    (folder / "state").mkdir()
    for name in nodes():
        (folder / "spool" / name).mkdir(parents=True)


def nodes() -> list[str]:
    """The names of the nodes. What is spread over them meets on the first by name, which is this machine's."""
    host = socket.gethostname().partition(".")[0]
    return [host, f"{host}-second"]


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """The configuration where Slurm's commands look for it; a link that a killed session left is replaced."""
    try:
        for name in FILES:
            (INSTALLED / name).unlink(missing_ok=True)
            (INSTALLED / name).symlink_to(folder / name)
        yield
    finally:
        for name in FILES:
            (INSTALLED / name).unlink(missing_ok=True)


@contextmanager
def daemon(folder: Path, name: str, *command: str) -> Iterator[None]:
    """A process that ends with the block, and with this process, also where that is killed."""
    with (folder / f"{name}.out").open("w") as messages:
        process = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command], stdout=messages, stderr=messages)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(LONG_ENOUGH)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_all_jobs(folder: Path) -> None:
    subprocess.run(["scancel", "--user", "root"], check=True)
    wait_for(lambda: not output("squeue", "--noheader"), folder)


def wait_for(condition: Callable[[], bool], folder: Path) -> None:
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > LONG_ENOUGH:
            logs = "\n".join(file.read_text()[-2000:] for file in sorted(folder.glob("*.log")))
            raise TimeoutError(f"Slurm did not come up, or its jobs did not end:\n{logs}")
        time.sleep(0.1)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in listening:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in listening]
