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

    total is None where nobody knows how much there is, and 0 where there is nothing to count.
    """

    def __init__(self, what: str, total: int | None, unit: str = "steps"):
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._note = ""
        self._bar = tqdm(total=total, desc=what, unit=f" {unit}", file=sys.stderr) if sys.stderr.isatty() else None
        self._start = self._last_line = time.monotonic()

    def __call__(self, done: int = 1, note: str = "") -> None:
        """`done` more are done; the note says what is worth watching."""
        self.done += done
        self._note = note or self._note
        if self._bar is not None:
            self._bar.set_postfix_str(self._note, refresh=False)
            self._bar.update(done)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        of_all = "" if self.total is None else f"/{self.total}"
        counted = f"{self.done}{of_all} {self.unit}, " if self.total != 0 else ""
        text = f"{self.what}: {counted}{self._last_line - self._start:.0f} s"
        print(f"{text}, {self._note}" if self._note else text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            self._print_line()
