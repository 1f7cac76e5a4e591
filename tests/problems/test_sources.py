"""Problem sets from files and from the hub, with their quirks and their faults."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.errors
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.config import ProblemSource
from halfmatch.errors import UserError
from halfmatch.problems import load, load_with_excluded
from halfmatch.problems.sources import read

DATA = Path(__file__).parents[3] / "shared" / "data"
REVISION = "0123456789abcdef0123456789abcdef01234567"
ROWS = [
    {"problem": 'Find $x$,\n"the root".', "answer": "025", "level": "1"},
    {"problem": "Größe?", "answer": "\\frac{1}{2}", "level": None},
]


def source(path: Path, **columns: str) -> ProblemSource:
    return ProblemSource(source="file", path=str(path), columns=columns)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    else:
        new = pa.ipc.new_stream if path.stem == "stream" else pa.ipc.new_file
        with new(path, table.schema) as out:
            out.write_table(table)
    return path


# -------------------------------------------------------------------------------------------------------------- formats
@pytest.mark.parametrize("name", ["set.parquet", "set.jsonl", "stream.arrow", "file.arrow", "set.csv", "SET.CSV"])
def test_every_format_gives_the_same_problems(name, tmp_path):
    rows = read(source(write(tmp_path / name.lower(), ROWS).rename(tmp_path / name), level="level"))
    assert [(row.number, row.problem, row.answer, row.level) for row in rows] == [
        (0, 'Find $x$,\n"the root".', "025", "1"),
        (1, "Größe?", "\\frac{1}{2}", None),
    ]


def test_other_names_of_columns(tmp_path):
    write(tmp_path / "set.jsonl", [{"question": "1+1", "final": 2, "problem": "no"}])
    (row,) = read(source(tmp_path / "set.jsonl", problem="question", answer="final"))
    assert (row.problem, row.answer, row.level) == ("1+1", "2", None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("025", "025"),
        (" \\frac{1}{2}\n", "\\frac{1}{2}"),
        (25, "25"),
        (142.0, "142"),
        (-4.0, "-4"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (326.5, "326.5"),
        (2.0**70, "1180591620717411303424"),
        (123456789012345678, "123456789012345678"),
        (Decimal("12.50"), "12.50"),
        (Decimal("12.00"), "12"),
    ],
)
def test_answers_become_text_exactly(value, text, tmp_path):
    write(tmp_path / "set.parquet", [{"problem": "p", "answer": value}])
    assert read(source(tmp_path / "set.parquet"))[0].answer == text


def test_csv_keeps_leading_zeros_and_empty_values(tmp_path):
    (tmp_path / "set.csv").write_text('﻿problem,answer\n"1,000 men",025\n\nnone,\n', encoding="utf-8")
    assert [(row.problem, row.answer) for row in read(source(tmp_path / "set.csv"))] == [
        ("1,000 men", "025"),
        ("none", ""),
    ]


def test_jsonl_may_mix_types_and_leave_keys_out(tmp_path):
    lines = '{"problem": "a", "answer": "007"}\n{"problem": "b", "answer": 7.0}\n{"problem": "c"}\n'
    (tmp_path / "set.jsonl").write_text(lines, encoding="utf-8")
    assert [row.answer for row in read(source(tmp_path / "set.jsonl"))] == ["007", "7", ""]


@given(value=st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)))
def test_no_number_changes_its_value_on_the_way(value, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("number") / "set.parquet", [{"problem": "p", "answer": value}])
    text = read(source(path))[0].answer
    assert type(value)(text) == value
    assert not text.endswith(".0")


def test_missing_values_are_empty(tmp_path):
    table = pa.table({"problem": ["a", None, "c"], "answer": pa.array([float("nan"), 1.0, None])})
    pa.parquet.write_table(table, tmp_path / "set.parquet")
    rows = read(source(tmp_path / "set.parquet"))
    assert [(row.problem, row.answer) for row in rows] == [("a", ""), ("", "1"), ("c", "")]


# --------------------------------------------------------------------------------------------------- the released sets
@pytest.mark.skipif(not DATA.exists(), reason="the shared problem sets are not here")
@pytest.mark.parametrize(
    ("name", "level", "count", "some_answers"),
    [
        ("aime24", "difficulty", 30, {"025", "033", "204"}),
        ("amc23", "difficulty", 83, {"142", "-4", "-1"}),
        ("math500", "difficulty", 500, {"\\left( 3, \\frac{\\pi}{2} \\right)", "\\text{Evelyn}", "(3,4]"}),
        ("math_sanity_r1d_1_5b", None, 1460, {"\\frac{17}{2}", "\\frac{1225}{72}", "48.0"}),
    ],
)
def test_the_released_problem_sets_load_whole(name, level, count, some_answers):
    spec = ProblemSource(source="file", path=str(DATA / f"{name}.parquet"), columns={"level": level})
    table, excluded = load_with_excluded(spec)
    assert (table.num_rows, excluded) == (count, [])
    answers = set(table["answer"].to_pylist())
    assert some_answers <= answers
    assert len(set(table["problem_id"].to_pylist())) == count


# --------------------------------------------------------------------------------------------------------------- faults
def one_line(spec: ProblemSource) -> str:
    with pytest.raises(UserError) as caught:
        load(spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("set.parquet", b"", "set.parquet: the file is empty"),
        ("set.parquet", b"PAR1 is not enough", "set.parquet: not readable as parquet"),
        ("set.arrow", b"ARROW1 is not enough", "set.arrow: not readable as arrow"),
        ("set.arrow", b"nor is this", "set.arrow: not readable as arrow"),
        ("set.jsonl", b"\n\n", "set.jsonl: there are no rows in it"),
        ("set.jsonl", b'{"problem": "a", "answer": "b"}\n{"problem"', "set.jsonl: line 2 is not JSON"),
        ("set.jsonl", b'[{"problem": "a", "answer": "b"}]', "set.jsonl: line 1 is a list"),
        ("set.jsonl", b'{"problem": "\xff", "answer": "b"}', "set.jsonl: not UTF-8"),
        ("set.jsonl", b'{"problem": ["a"], "answer": "b"}', "row 0, column 'problem': a list where text or a number"),
        ("set.csv", b"problem,answer\n", "set.csv: there are no rows in it"),
        ("set.csv", b"problem,answer\n1,000,1\n", "set.csv: line 2 has 3 values, and the header 2; put values with"),
        ("set.csv", "problem,answer\nGröße,1\n".encode("latin-1"), "set.csv: not UTF-8"),
        ("set.csv", b'problem,answer\n"open,1\n', "set.csv: not readable as csv"),
        ("set.txt", b"1+1=2", "set.txt: cannot tell its format; the name has to end in .parquet, .jsonl, .arrow, .csv"),
        ("set", b"1+1=2", "set: cannot tell its format"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert message in one_line(source(tmp_path / name))


@pytest.mark.parametrize("name", ["set.parquet", "file.arrow", "stream.arrow"])
def test_a_truncated_file_is_one_line(name, tmp_path):
    path = write(tmp_path / name, ROWS * 50)
    path.write_bytes(path.read_bytes()[:-100])
    assert "not readable as" in one_line(source(path))


def test_a_file_in_another_format_than_its_name_says(tmp_path):
    path = write(tmp_path / "set.parquet", ROWS).rename(tmp_path / "set.jsonl")
    assert "set.jsonl: " in one_line(source(path))
    path = write(tmp_path / "set.csv", ROWS).rename(tmp_path / "set.parquet")
    assert "not readable as parquet" in one_line(source(path))


def test_a_missing_file_and_a_folder(tmp_path):
    assert "there is no such file" in one_line(source(tmp_path / "none.csv"))
    (tmp_path / "folder.csv").mkdir()
    assert "there is no such file" in one_line(source(tmp_path / "folder.csv"))


@pytest.mark.parametrize("name", ["set.parquet", "set.jsonl", "stream.arrow", "file.arrow", "set.csv"])
def test_a_wrong_column_names_the_columns_and_the_nearest(name, tmp_path):
    path = write(tmp_path / name, [{"problem": "1+1", "answers": "2", "level": "1"}])
    message = one_line(source(path))
    assert "no column 'answer' for columns.answer; its columns are problem, answers, level" in message
    assert "did you mean answers?" in message


# ------------------------------------------------------------------------------------------------------------------ hub
def hub(**changes: Any) -> ProblemSource:
    return ProblemSource(**{"source": "hub", "id": "owner/set", "revision": REVISION, "split": "test", **changes})


def test_the_hub_is_asked_for_the_pinned_revision(monkeypatch):
    asked = []

    def load_dataset(*names: Any, **settings: Any) -> datasets.Dataset:
        asked.append((names, settings))
        return datasets.Dataset.from_list([{**row, "more": 1} for row in ROWS])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = load(hub(subset="main", columns={"level": "level"}))
    assert asked == [(("owner/set", "main"), {"split": "test", "revision": REVISION})]
    assert sorted(table["answer"].to_pylist()) == ["025", "\\frac{1}{2}"]
    assert set(table["source"].to_pylist()) == {f"owner/set@{REVISION}"}
    assert set(table["split"].to_pylist()) == {"test"}


def response(status: int) -> Any:
    import httpx2

    return httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            datasets.exceptions.DatasetNotFoundError(
                "Dataset 'owner/set' is a gated dataset on the Hub. You must be authenticated to access it."
            ),
            "hf auth login",
        ),
        (
            datasets.exceptions.DatasetNotFoundError(
                "Dataset 'owner/set' doesn't exist on the Hub or cannot be accessed."
            ),
            "doesn't exist on the Hub or cannot be accessed.; check id, revision, subset and split",
        ),
        (ConnectionError("Couldn't reach 'owner/set' on the Hub (LocalEntryNotFoundError)"), "cannot be reached"),
        (
            huggingface_hub.errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"),
            "cannot be reached (HF_HUB_OFFLINE is set)",
        ),
        (ValueError("Unknown split \"test\". Should be one of ['train']."), 'Unknown split "test". Should be one of'),
        (ValueError("BuilderConfig 'x' not found.\nAvailable: ['main']"), "BuilderConfig 'x' not found."),
        (RuntimeError("Dataset scripts are no longer supported, but found set.py"), "scripts are no longer supported"),
        (datasets.exceptions.DataFilesNotFoundError("No (supported) data files found in owner/set"), "data files"),
        (datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset"), "generating"),
        (huggingface_hub.errors.HfHubHTTPError("500 Server Error", response=response(500)), "500 Server Error"),
        (OSError(), "OSError"),
    ],
)
def test_whatever_the_hub_says_is_one_line_that_names_the_dataset(error, message, monkeypatch):
    def load_dataset(*names: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    said = one_line(hub())
    assert message in said
    assert "owner/set" in said


@pytest.fixture
def dataset_folder(tmp_path, monkeypatch) -> Path:
    """A dataset as it lies in a repository of the hub, without a script, and a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    folder.mkdir()
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), folder / "test.parquet")
    return folder


def test_a_real_dataset_folder_is_loaded_by_the_real_loader(dataset_folder):
    table = load(hub(id=str(dataset_folder)))
    assert sorted(table["answer"].to_pylist()) == ["025", "\\frac{1}{2}"]


def test_the_real_loader_names_the_splits_there_are(dataset_folder):
    assert "Should be one of ['test']" in one_line(hub(id=str(dataset_folder), split="train"))


def test_a_wrong_column_of_a_dataset(dataset_folder):
    said = one_line(hub(id=str(dataset_folder), columns={"problem": "problems"}))
    assert "no column 'problems' for columns.problem; its columns are problem, answer, level" in said
    assert "did you mean problem?" in said
