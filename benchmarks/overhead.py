"""What planning costs: `halfmatch --help`, a no-op `snakemake -n` and `dvc repro`, a plan of the paper's scale.

    python benchmarks/overhead.py

Clones the repository into a temporary folder and gives it an empty stand-in for every result of the laptop run, so that
both tools have all of its jobs to look at and none to run. Then Snakemake plans 2,377 jobs, none of which has run.
Prints the fastest of three, in seconds of the clock and of the processor: on a busy machine the latter is the one to
look at.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TRIES = 3
PAPER_SCALE = ("config/paper.yaml", "benchmarks/paper_scale.yaml")

# Run inside the clone: an empty file for every output of every stage, and a folder with one where it has no suffix.
STAND_INS = """
from pathlib import Path
from dvc.repo import Repo
for out in Repo().index.outs:
    path = Path(out.fs_path)
    file = path if path.suffix else path / "stand-in"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
"""


def run(folder: Path, *command: str) -> tuple[float, float, str]:
    """Seconds of the clock, of the processor, and the output of a command of this environment."""
    paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": "src", "SMK_ARGS": "--cores 2"}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True)
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return clock, processor, done.stdout + done.stderr


def finished_clone(folder: Path) -> None:
    """The repository as it is committed, with results that both tools take for finished."""
    run(REPOSITORY, "git", "clone", "--quiet", str(REPOSITORY), str(folder))
    run(folder, "dvc", "config", "core.analytics", "false")
    run(folder, sys.executable, "-c", STAND_INS)
    run(folder, "snakemake", "--touch", "--forceall", "--quiet", "--", "all")
    run(folder, "dvc", "commit", "--force", "--quiet")


def main() -> None:
    print("| command | clock, s | processor, s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "halfmatch"
        finished_clone(folder)
        for command, expected in (
            (("halfmatch", "--help"), "measure"),
            (("snakemake", "-n"), "Nothing to be done"),
            (("dvc", "repro"), "up to date"),
            (("snakemake", "-n", "--quiet", "rules", "--configfile", *PAPER_SCALE), "2377"),
        ):
            tries = [run(folder, *command) for _ in range(TRIES)]
            if not all(expected in output for _, _, output in tries):
                raise SystemExit(f"{' '.join(command)} does not say {expected!r}:\n{tries[0][2]}")
            print(f"| `{' '.join(command)}` | {min(t[0] for t in tries):.2f} | {min(t[1] for t in tries):.2f} |")


if __name__ == "__main__":
    main()
