"""A grader that starts no process, for the steps that grade."""

from __future__ import annotations

from typing import Self

import pytest

from halfmatch import sampling
from halfmatch.grading import Verdict
from halfmatch.steps import train


class ParityGrader:
    """Right where the response has an even number of letters: rewards that differ, without math-verify's start."""

    def __init__(self, **settings: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def grade_many(self, items: list[tuple[str, str, bool]]) -> list[Verdict]:
        return [Verdict("wrong" if len(text) % 2 else "correct", text) for text, _, _ in items]


@pytest.fixture
def quick_grader(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (train, sampling):
        monkeypatch.setattr(module, "Grader", ParityGrader)
