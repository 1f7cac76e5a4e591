"""The log of a training run: one row an optimizer step, in a file that grows as the run does, and as an artefact."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from halfmatch import artifacts

COLUMNS: tuple[str, ...] = tuple(artifacts.TABLES["training_log"].schema.names)


def complete(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with every column, None where it has no value; ValueError for a value without a column."""
    if strangers := row.keys() - set(COLUMNS):
        raise ValueError(f"no column for {', '.join(sorted(strangers))}")
    return {name: row.get(name) for name in COLUMNS}


class LiveTable:
    """A CSV that is read while it grows: rows are on disk when `append` returns. Without a folder it goes nowhere."""

    def __init__(self, folder: Path | None, name: str, columns: Iterable[str], rows: Iterable[Mapping[str, Any]] = ()):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        path = os.devnull if folder is None else folder / name
        self._file: IO[str] = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115
        self._writer = _csv_writer(self._file, columns)
        for row in rows:
            self._writer.writerow(row)
        self._file.flush()

    def append(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_curves(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the whole log as CSV: floats in their shortest exact form, empty where there is no value."""
    with artifacts.atomic(path, "w") as file:
        _csv_writer(file, COLUMNS).writerows(rows)


def _csv_writer(file: IO[str], columns: Iterable[str]) -> csv.DictWriter[str]:
    writer = csv.DictWriter(file, tuple(columns), lineterminator="\n")
    writer.writeheader()
    return writer
