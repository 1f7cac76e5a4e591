"""Every table that lies between two steps: its schema, and how it is written and read.

The same rows and provenance give the same bytes (pyarrow is pinned: its version stands in a file's footer). Files appear
by rename when they are complete. Provenance is what follows from the inputs; times, hosts and paths stay out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from halfmatch.errors import UserError

SCHEMA_VERSION = 1
PROVENANCE_KEY = b"halfmatch"
ROWS_A_GROUP = 4096

_TOKENS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_LOGPROBS = pa.list_(pa.field("element", pa.float32(), nullable=False))


def _schema(*fields: tuple[str, pa.DataType] | tuple[str, pa.DataType, bool]) -> pa.Schema:
    """A schema of (name, type[, nullable]); fields are required unless said."""
    return pa.schema([pa.field(f[0], f[1], nullable=bool(f[2]) if len(f) == 3 else False) for f in fields])


@dataclass(frozen=True)
class Table:
    """A declared table: its columns and the columns that rows are unique in and sorted by."""

    schema: pa.Schema
    key: tuple[str, ...]


_PROBLEM = (
    ("problem_id", pa.string()),
    ("problem", pa.string()),
    ("answer", pa.string()),
    ("source", pa.string()),
    ("split", pa.string()),
    ("level", pa.string(), True),
)

TABLES: Mapping[str, Table] = {
    # problem_id: content hash of problem and answer
    "problems": Table(_schema(*_PROBLEM), ("problem_id",)),
    # rows of the source that did not become problems: row number in the source, and why
    "excluded": Table(_schema(("row", pa.int64()), ("reason", pa.string()), ("problem", pa.string())), ("row", "reason")),
    # token_ids and logprobs (nats, under the distribution sampled from) have one entry a sampled token, EOS included;
    # finish_reason: stop or length; verdict: correct, wrong, truncated, timeout, unparseable, or null where not graded
    "completions": Table(
        _schema(
            ("problem_id", pa.string()),
            ("sample", pa.int32()),
            ("prompt_ids", _TOKENS),
            ("token_ids", _TOKENS),
            ("logprobs", _LOGPROBS),
            ("finish_reason", pa.string()),
            ("verdict", pa.string(), True),
        ),
        ("problem_id", "sample"),
    ),
    # solve_rate_low and _high: Wilson interval; kept: inside the band of the configuration
    "perfectible": Table(
        _schema(
            *_PROBLEM,
            ("tries", pa.int32()),
            ("solved", pa.int32()),
            ("wrong", pa.int32()),
            ("truncated", pa.int32()),
            ("timeout", pa.int32()),
            ("unparseable", pa.int32()),
            ("solve_rate", pa.float64()),
            ("solve_rate_low", pa.float64()),
            ("solve_rate_high", pa.float64()),
            ("kept", pa.bool_()),
        ),
        ("problem_id",),
    ),
    # log μ and log π of the same tokens, in nats
    "scores": Table(
        _schema(
            ("problem_id", pa.string()),
            ("sample", pa.int32()),
            ("token_ids", _TOKENS),
            ("logp_rollout", _LOGPROBS),
            ("logp_train", _LOGPROBS),
        ),
        ("problem_id", "sample"),
    ),
    # per-problem counts of one evaluation; majority: the most frequent answer among the samples is correct
    "evaluation": Table(
        _schema(
            ("problem_id", pa.string()),
            ("samples", pa.int32()),
            ("correct", pa.int32()),
            ("wrong", pa.int32()),
            ("truncated", pa.int32()),
            ("timeout", pa.int32()),
            ("unparseable", pa.int32()),
            ("mean_tokens", pa.float64()),
        ),
        ("problem_id",),
    ),
}


@contextmanager
def atomic(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that appears under its name only when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, mode, **({} if "b" in mode else {"encoding": "utf-8", "newline": "\n"})) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Token ids as dictionaries, log-probs as byte streams: what compresses best of what Parquet has."""
    logprobs = {f"{field.name}.list.element": "BYTE_STREAM_SPLIT" for field in schema if field.type == _LOGPROBS}
    others = [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
        if field.type != _LOGPROBS and not pa.types.is_boolean(field.type)
    ]
    return {"use_dictionary": others, "column_encoding": logprobs or None}


class Writer:
    """Streams rows into one table; `with Writer(path, "completions", provenance) as out: out.write(rows)`.

    Rows arrive in the order of the table's key; what arrives out of order or twice raises ValueError. The file appears
    when the block ends without an error.
    """

    def __init__(self, path: Path, table: str, provenance: Mapping[str, Any]):
        self.path = Path(path)
        self.table = TABLES[table]
        header = {"table": table, "schema_version": SCHEMA_VERSION, **provenance}
        metadata = {PROVENANCE_KEY: json.dumps(header, sort_keys=True, ensure_ascii=False).encode()}
        self.schema = self.table.schema.with_metadata(metadata)
        self._last_key: tuple[Any, ...] | None = None
        self._pending: list[dict[str, Any]] = []

    def __enter__(self) -> Writer:
        self._file = atomic(self.path)
        self._writer = pq.ParquetWriter(
            self._file.__enter__(), self.schema, compression="zstd", store_schema=True, **_encodings(self.schema)
        )
        return self

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            key = tuple(row[name] for name in self.table.key)
            if self._last_key is not None and key <= self._last_key:
                raise ValueError(f"{self.path}: row {key} after {self._last_key}; rows are unique and sorted by {self.table.key}")
            self._last_key = key
            self._pending.append(dict(row))
            if len(self._pending) == ROWS_A_GROUP:
                self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_pylist(self._pending, schema=self.schema))
            self._pending = []

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
        finally:
            self._file.__exit__(kind, error, trace)


def write(path: Path, table: str, rows: Iterable[Mapping[str, Any]], provenance: Mapping[str, Any]) -> None:
    """Write a whole table; rows are sorted by the table's key here."""
    key = TABLES[table].key
    with Writer(path, table, provenance) as out:
        out.write(sorted(rows, key=lambda row: tuple(row[name] for name in key)))


def open_table(path: Path, table: str) -> pq.ParquetFile:
    """Open a table after checking that it is one, whole, and of the declared schema; UserError otherwise."""
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; the step that writes it has not run") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a complete Parquet file ({error}); remove it and run its step again") from None
    header = json.loads((file.schema_arrow.metadata or {}).get(PROVENANCE_KEY, b"{}"))
    if header.get("table") != table:
        raise UserError(f"{path}: holds {header.get('table', 'no table of halfmatch')!r}, where {table!r} is needed")
    if header["schema_version"] != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {header['schema_version']}, and this halfmatch reads {SCHEMA_VERSION}; run its step again"
        )
    if not file.schema_arrow.equals(TABLES[table].schema):
        raise UserError(f"{path}: its columns differ from the declared table {table!r}; run its step again")
    return file


def read(path: Path, table: str, columns: list[str] | None = None) -> pa.Table:
    """Read a whole table, or some of its columns."""
    return open_table(path, table).read(columns=columns)


def row_groups(path: Path, table: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Read a table a row group at a time, in flat memory."""
    file = open_table(path, table)
    for group in range(file.num_row_groups):
        yield file.read_row_group(group, columns=columns)


def provenance(path: Path) -> dict[str, Any]:
    """What a Parquet or JSON artefact says of the inputs it came from."""
    if Path(path).suffix == ".json":
        return json.loads(Path(path).read_text(encoding="utf-8"))["provenance"]
    return json.loads((pq.read_schema(path).metadata or {}).get(PROVENANCE_KEY, b"{}"))


def write_json(path: Path, content: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write metrics: sorted keys, shortest exact floats, no NaN (null instead), provenance beside them."""
    with atomic(path, "w") as file:
        json.dump(_finite({**content, "provenance": provenance}), file, sort_keys=True, indent=1, allow_nan=False)
        file.write("\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return None
    return value
