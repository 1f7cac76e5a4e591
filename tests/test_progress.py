"""Progress in a log: a line now and then, and one at the end."""

from __future__ import annotations

import pytest

from halfmatch import progress
from halfmatch.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until a test moves it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_few_seconds_and_one_at_the_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", 40, "iterations") as tell:
        for _ in range(40):
            clock[0] += 0.6
            tell(1, "reward 0.25")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train: 17/40 iterations, 10 s, reward 0.25",
        "train: 34/40 iterations, 20 s, reward 0.25",
        "train: 40/40 iterations, 24 s, reward 0.25",
    ]


def test_without_a_total_what_is_done_is_told_alone(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("fidelity", None, "gradients") as tell:
        tell(3)
    assert capsys.readouterr().err == "fidelity: 3 gradients, 0 s\n"


def test_an_error_is_no_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Progress("train", 2):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert capsys.readouterr().err == ""


def test_where_there_is_nothing_to_count_the_time_is_told(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("model", 0):
        clock[0] += 7
    assert capsys.readouterr().err == "model: 7 s\n"
