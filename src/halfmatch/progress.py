"""How far a step is: a bar on a terminal, a line every few seconds in a log or beside other jobs."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts what is done: `with Progress("train bf16", 60, "iterations") as progress: progress(1, "reward 0.41")`.

    total is None where nobody knows how much there is.
    """

    def __init__(self, what: str, total: int | None, unit: str = "steps"):
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._bar = tqdm(total=total, desc=what, unit=f" {unit}", file=sys.stderr) if sys.stderr.isatty() else None
        self._start = self._last_line = time.monotonic()

    def __call__(self, done: int = 1, note: str = "") -> None:
        """`done` more are done; the note says what is worth watching."""
        self.done += done
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or self.done == self.total:
            self._last_line = now
            elapsed = now - self._start
            of_all = "" if self.total is None else f"/{self.total}"
            text = f"{self.what}: {self.done}{of_all} {self.unit}, {elapsed:.0f} s"
            print(f"{text}, {note}" if note else text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
