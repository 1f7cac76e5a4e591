"""Responses that are kept: in any order of files, once each, and only for the course that they are of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.engines import Completion
from halfmatch.errors import UserError
from halfmatch.grading import Verdict
from halfmatch.responses import KeptResponses, Response

COURSE = {"settings": "1"}


def response(problem: int, sample: int) -> Response:
    completion = Completion([problem, sample], [-0.5, -0.25], "stop")
    return Response(f"p{problem}", sample, [7], completion, Verdict("wrong", f"{problem}.{sample}"))


KEYS = st.tuples(st.integers(0, 9), st.integers(0, 99))


@given(st.dictionaries(KEYS, st.integers(0, 4), min_size=1))
def test_what_is_wanted_comes_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, call_of: dict[tuple[int, int], int]
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    for call in set(call_of.values()):
        KeptResponses(folder, COURSE).add([response(*key) for key in sorted(call_of) if call_of[key] == call])
    wanted = {(f"p{problem}", sample) for problem, sample in call_of if sample % 2 == 0}
    expected = [response(int(problem[1:]), sample) for problem, sample in sorted(wanted)]
    assert list(KeptResponses(folder, COURSE).wanted(wanted)) == expected


def test_responses_of_another_course_are_removed(tmp_path: Path) -> None:
    KeptResponses(tmp_path / "kept", COURSE).add([response(1, 0)])
    assert KeptResponses(tmp_path / "kept", COURSE).keys() == {("p1", 0)}
    assert KeptResponses(tmp_path / "kept", {"settings": "2"}).keys() == set()
    assert KeptResponses(tmp_path / "kept", COURSE).keys() == set()


def test_a_write_that_was_killed_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    kept = KeptResponses(tmp_path / "kept", COURSE)
    kept.add([response(1, 0)])
    whole = next(kept.folder.glob("*.parquet"))
    (kept.folder / f".{whole.name}.part").write_bytes(whole.read_bytes()[:100])
    assert KeptResponses(kept.folder, COURSE).keys() == {("p1", 0)}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    kept = KeptResponses(tmp_path / "kept", COURSE)
    kept.add([response(1, 0)])
    whole = next(kept.folder.glob("*.parquet"))
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(UserError, match="not a complete Parquet file"):
        kept.keys()
