"""Checkouts of this repository in temporary folders, with the tiny run as their configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.yaml")
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Checkout:
    """A copy of the repository's files, as git has them."""

    root: Path

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in the checkout; its output is shown where it fails."""
        done = subprocess.run(
            command, cwd=self.root, env=self.environment(**environment), capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            pytest.fail(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
            )
        return done

    def environment(self, **changes: str) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.root / "src"),
            "SMK_ARGS": "--cores 2",
            **changes,
        }

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=halfmatch", "-c", "user.email=halfmatch@example.org"]
        return self.run("git", *identity, *arguments).stdout


def copy_of_repository(folder: Path) -> Checkout:
    """The files that git tracks or would, committed in a repository of their own, with the tiny run to be versioned."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    checkout = Checkout(folder)
    tiny = checkout.run("halfmatch", "config", "--config", str(TINY)).stdout
    (folder / "config/config.yaml").write_text(tiny, encoding="utf-8")
    stages = checkout.run("halfmatch", "config", "--config", "config/config.yaml", "--as", "stages").stdout
    (folder / "dvc.yaml").write_text(stages, encoding="utf-8")
    (folder / "dvc.lock").unlink(missing_ok=True)
    checkout.git("init", "--quiet", "--initial-branch", "main")
    checkout.git("add", "--all")
    checkout.git("commit", "--quiet", "--message", "The tiny run")
    return checkout


@pytest.fixture(scope="session")
def new_checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkout]:
    """Makes checkouts, by a name for each."""
    return lambda name: copy_of_repository(tmp_path_factory.mktemp(name))


# An empty file for every output of every stage, and a folder with one where it has no suffix.
STAND_INS = """
from pathlib import Path
from dvc.repo import Repo
for out in Repo().index.outs:
    path = Path(out.fs_path)
    file = path if path.suffix else path / "stand-in"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
"""


@pytest.fixture(scope="session")
def stand_ins() -> Callable[[Checkout], None]:
    """Gives a checkout a stand-in of every result, which both tools take for what they made."""

    def make(checkout: Checkout) -> None:
        checkout.run(sys.executable, "-c", STAND_INS)
        checkout.run("snakemake", "--touch", "--forceall", "--quiet", "--", "all")
        checkout.run("dvc", "commit", "--force", "--quiet")

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout in which Snakemake ran everything and recorded it for DVC. Tests leave it as it is."""
    checkout = copy_of_repository(tmp_path_factory.mktemp("finished"))
    checkout.run("snakemake", "--cores", "2", "--", "record")
    return checkout
