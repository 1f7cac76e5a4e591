"""Rows of problem sets as they come, from local files and from the Hugging Face hub.

What cannot be read is one line that says what, where, and what to do.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from halfmatch.config import Columns, ProblemSource
from halfmatch.errors import UserError, nearest

RawRow = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One row of a source, as text. `number` counts the rows of the source from 0."""

    number: int
    problem: str
    answer: str
    level: str | None = None


def read(source: ProblemSource) -> list[Row]:
    """The rows of a file or of a dataset of the hub; UserError where there are none to be had."""
    if source.source == "hub":
        where, rows = f"{source.id}@{source.revision}", _hub_rows(source)
    else:
        where, rows = str(source.path), _file_rows(Path(str(source.path)).expanduser(), source.columns)
    if not rows:
        raise UserError(f"{where}: there are no rows in it")
    return [_row(number, row, source.columns, where) for number, row in enumerate(rows)]


def _row(number: int, row: RawRow, columns: Columns, where: str) -> Row:
    def text(column: str) -> str:
        try:
            return _as_text(row.get(column))
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError(f"{where}: row {number}, column {column!r}: {error}") from None

    level = text(columns.level) if columns.level else ""
    return Row(number, text(columns.problem), text(columns.answer).strip(), level or None)


def _as_text(value: object) -> str:
    """Text as it is (025 stays 025), numbers exactly, whole ones without decimals (142.0 is 142), none as empty."""
    if value is None or value != value:  # NaN is how a column of numbers says that there is none
        return ""
    if isinstance(value, float | Decimal) and value % 1 == 0:
        return str(int(value))
    if isinstance(value, str):
        value.encode()  # refuses halves of surrogate pairs, which JSON can spell and no file can hold
        return value
    if isinstance(value, int | float | Decimal):
        return str(value)
    raise TypeError(f"a {type(value).__name__} where text or a number is needed")


def _require(columns: Columns, existing: Iterable[str], where: object) -> list[str]:
    """The names of the columns to read, after checking that they exist."""
    existing = list(existing)
    wanted = {key: name for key, name in columns.model_dump().items() if name is not None}
    for key, name in wanted.items():
        if name not in existing:
            raise UserError(
                f"{where}: there is no column {name!r} for columns.{key}; its columns are {', '.join(existing)}; "
                f"{nearest(name, existing)}"
            )
    return list(wanted.values())


# --------------------------------------------------------------------------------------------------------------- files
def _parquet_rows(path: Path, columns: Columns) -> list[RawRow]:
    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read(columns=_require(columns, file.schema_arrow.names, path)).to_pylist()


def _arrow_rows(path: Path, columns: Columns) -> list[RawRow]:
    """Both formats of Arrow: with an index at its end (Feather), and as a stream (Hugging Face datasets)."""
    with pa.OSFile(str(path)) as file:
        is_indexed = file.read(6) == b"ARROW1"
        file.seek(0)
        table = (pa.ipc.open_file if is_indexed else pa.ipc.open_stream)(file).read_all()
    return table.select(_require(columns, table.column_names, path)).to_pylist()


def _jsonl_rows(path: Path, columns: Columns) -> list[RawRow]:
    rows: list[RawRow] = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # a number of thousands of digits is no JSONDecodeError
                raise UserError(f"{path}: line {number} is not JSON ({error}); JSONL has one object a line") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}: line {number} is a {type(row).__name__}; JSONL has one object a line")
            rows.append(row)
    if rows:
        _require(columns, dict.fromkeys(name for row in rows for name in row), path)
    return rows


def _csv_rows(path: Path, columns: Columns) -> list[RawRow]:
    """A CSV file with a header; every value is text, so that leading zeros stay."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        rows: list[RawRow] = []
        for values in reader:
            if values and len(values) != len(header):
                raise UserError(
                    f"{path}: line {reader.line_num} has {len(values)} values, and the header {len(header)}; "
                    "put values with commas in quotes"
                )
            if values:
                rows.append(dict(zip(header, values, strict=True)))
    if rows:
        _require(columns, header, path)
    return rows


READERS: Mapping[str, Callable[[Path, Columns], list[RawRow]]] = {
    ".parquet": _parquet_rows,
    ".jsonl": _jsonl_rows,
    ".arrow": _arrow_rows,
    ".csv": _csv_rows,
}


def _file_rows(path: Path, columns: Columns) -> list[RawRow]:
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path}: cannot tell its format; the name has to end in {', '.join(READERS)}")
    kind = path.suffix.lower().removeprefix(".")
    try:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty")
        return READERS[path.suffix.lower()](path, columns)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); convert it to UTF-8") from None
    except (pa.ArrowException, csv.Error, OSError) as error:
        raise UserError(f"{path}: not readable as {kind}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ----------------------------------------------------------------------------------------------------------------- hub
def _hub_rows(source: ProblemSource) -> list[RawRow]:
    import datasets

    try:
        dataset = datasets.load_dataset(source.id, source.subset, split=source.split, revision=source.revision)
    except ConnectionError as error:
        raise UserError(
            f"{source.id}: the Hugging Face hub cannot be reached ({_first_line(error)}); connect, or download the "
            "dataset and use source: file"
        ) from None
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        advice = (
            "accept its terms on its page and log in with `hf auth login`"
            if "gated" in str(error)
            else "check id, revision, subset and split"
        )
        raise UserError(
            f"{source.id}@{source.revision}, split {source.split}: {_first_line(error)}; {advice}"
        ) from None
    return dataset.select_columns(_require(source.columns, dataset.column_names, source.id)).to_list()
