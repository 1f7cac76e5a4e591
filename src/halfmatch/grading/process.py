"""The parent's side of a grading process."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from halfmatch.errors import UserError
from halfmatch.grading import worker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Named through the import, so that a list of what a step runs (see `code_files`) has the grader in it.
_PROGRAM = f"from {worker.__name__} import main; main()"

START_LIMIT_S = 120.0
# The limit of a task is processor time, so that a busy machine does not change a verdict; a process that sleeps, or
# hardly gets a processor, is given up after this many times as long and some seconds more.
WALL_CLOCK_FACTOR = 4.0
WALL_CLOCK_MARGIN_S = 10.0


class GradingProcess:
    """One process that grades, started on first use and again after it was killed. One thread uses it at a time.

    A program of its own rather than a fork or a spawn of this one: a fork would copy the locks of torch's threads, a
    spawn would import the caller's main module again.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process and wait until it has checked itself; UserError where it cannot grade."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._connection, other_end = Pipe()
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(other_end.fileno())],
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy orders terms by hashes: the same verdict every time
                start_new_session=True,  # an interrupt is for the parent, which ends this process by closing its end
            )
        try:
            problem = self._connection.recv() if self._connection.poll(START_LIMIT_S) else "it does not answer"
        except EOFError:
            problem = f"it ended with status {self._process.wait()}; see its messages above"
        if problem is not None:
            self.close()
            raise UserError(f"grading process: {problem}")

    def ask(self, task: str, *arguments: str, timeout_s: float) -> Any:
        """The result of a task; None where it went over the limit of time or memory, and the process with it."""
        self.start()
        assert self._connection is not None
        try:
            self._connection.send((task, arguments, timeout_s))
            if self._connection.poll(WALL_CLOCK_FACTOR * timeout_s + WALL_CLOCK_MARGIN_S):
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        self.close()
        return None

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
