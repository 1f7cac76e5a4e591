"""Kills steps at moments of their own work. A checkout has this file as src/sitecustomize.py, which Python runs first.

KILLS names a folder with a file for every kill to come, STEP-NUMBER, that holds its moment as JSON: just before the
`change`th change of a file below results/, or `seconds` later; at the end of the process where that comes first. Killed
is the `job` alone, as schedulers and full memories do it, or `all`: Snakemake and what it started, as in a power cut.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def changed(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The path below results/ that a process is about to change, of what Python tells to audit hooks."""
    path = arguments[0] if arguments else None
    writes = event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
    return os.fspath(path) if writes and isinstance(path, str | Path) and "results/" in os.fspath(path) else None


def kill(file: Path, who: str, moment: str) -> None:
    """End this process, or its group, after the kill's file is renamed and says when it was."""
    with contextlib.suppress(FileNotFoundError):  # another job of the step was killed by it
        file.rename(file.with_suffix(".done")).write_text(moment, encoding="utf-8")
    if who == "all":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(file: Path) -> None:
    """Have this process killed as a file says."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    numbers = itertools.count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if (path := changed(event, arguments)) and next(numbers) == settings["change"]:
            moment = f"{settings['seconds']} s after {event} {path}"
            if settings["seconds"] == 0:
                kill(file, settings["who"], moment)
            threading.Timer(settings["seconds"], kill, (file, settings["who"], moment)).start()

    sys.addaudithook(watch)
    atexit.register(kill, file, settings["who"], "at the end")


if len(sys.orig_argv) > 2 and sys.orig_argv[1].endswith("/halfmatch"):
    coming = sorted(Path(os.environ["KILLS"]).glob(f"{sys.orig_argv[2]}-?"))
    if coming:
        prepare(coming[0])
