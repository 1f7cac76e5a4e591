"""What killed processes leave of half-written files and folders goes with the next write; what others write stays."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from halfmatch import artifacts
from halfmatch.models.folder import staged

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from halfmatch import artifacts
from halfmatch.models.folder import staged
path = Path(sys.argv[2])
with artifacts.atomic(path, "w") if sys.argv[1] == "file" else staged(path) as begun:
    begun.write("half") if sys.argv[1] == "file" else (begun / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(kind: str, path: Path) -> None:
    if kind == "file":
        with artifacts.atomic(path, "w") as file:
            file.write("whole")
    else:
        with staged(path) as folder:
            (folder / "whole").touch()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_has_left_goes_with_the_next_write(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a*[b]"  # whose name is a pattern as well
    subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, kind, str(path)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a*[b].")
    write(kind, path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_others_write_stays(tmp_path: Path, kind: str) -> None:
    host = platform.node().split(".")[0]
    names = [f"model.{host}.{os.getppid()}", f"model.{host}.iteration", f"another.{host}.999999999"]
    names.append("model.elsewhere.999999999")  # of a machine that shares the folder
    others = [tmp_path / f".{name}.part" for name in names]
    for path in others:
        path.touch()
    write(kind, tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "model"])
