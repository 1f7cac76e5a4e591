"""After `git clone` and `dvc pull`, or `dvc checkout`: tell Snakemake that the results are those of this code."""

from __future__ import annotations

import subprocess
import sys

from halfmatch.errors import UserError


def restore() -> None:
    """Give Snakemake back what it knows of its outputs, if DVC says that they belong to this code and configuration.

    Snakemake compares times, and after a checkout every file is new in no order; its own records do not travel. DVC
    compares contents, so it is asked first.
    """
    status = _run("dvc", "status")
    if status.returncode or "up to date" not in status.stdout:
        raise UserError(
            "the results here are not those that dvc.lock records for this code and configuration:\n"
            f"{status.stdout}{status.stderr}\nget them with `dvc pull`, or make them with `snakemake`"
        )
    touched = _run("snakemake", "--touch", "--forceall", "--quiet", "all")
    if touched.returncode:
        raise UserError(f"snakemake --touch failed:\n{touched.stdout}{touched.stderr}")
    print("the results are up to date: `snakemake -n` and `dvc status` have nothing to do", file=sys.stderr)


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
