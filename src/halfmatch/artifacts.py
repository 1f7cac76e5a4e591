"""Every table that lies between two steps: its schema, and how it is written and read.

The same rows and provenance give the same bytes (pyarrow is pinned: its version stands in a file's footer). Files
appear by rename when they are complete, and carry a checksum a page. Provenance is what follows from the inputs; times,
hosts and paths stay out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from halfmatch.errors import UserError
from halfmatch.staging import staging_path

SCHEMA_VERSION = 1
PROVENANCE_KEY = b"halfmatch"
# A row group ends at the row that reaches either bound, so that memory grows neither with the number of rows nor with
# the length of responses; both are functions of the rows alone, as the bytes must be.
ROWS_A_GROUP = 4096
TOKENS_A_GROUP = 1 << 20

_TOKENS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_COUNTS = _TOKENS
_LOGPROBS = pa.list_(pa.field("element", pa.float32(), nullable=False))


def _schema(*fields: tuple[str, pa.DataType] | tuple[str, pa.DataType, bool]) -> pa.Schema:
    """A schema of (name, type[, nullable]); fields are required unless said."""
    return pa.schema([pa.field(f[0], f[1], nullable=bool(f[2]) if len(f) == 3 else False) for f in fields])


@dataclass(frozen=True)
class Table:
    """A declared table.

    key: the columns that rows are unique in and sorted by.
    aligned: list columns with one entry a sampled token, equally long in every row.
    """

    schema: pa.Schema
    key: tuple[str, ...]
    aligned: tuple[str, ...] = ()


_PROBLEM = (
    ("problem_id", pa.string()),
    ("problem", pa.string()),
    ("answer", pa.string()),
    ("source", pa.string()),
    ("split", pa.string()),
    ("level", pa.string(), True),
)
_COMPLETION = (
    ("problem_id", pa.string()),
    ("sample", pa.int32()),
    ("prompt_ids", _TOKENS),
    ("token_ids", _TOKENS),
    ("logprobs", _LOGPROBS),
    ("finish_reason", pa.string()),
    ("verdict", pa.string(), True),
)
_TALLY = (
    ("problem_id", pa.string()),
    *((name, pa.int32()) for name in ("samples", "correct", "wrong", "truncated", "timeout", "unparseable")),
    ("wrong_votes", _COUNTS),
    ("mean_tokens", pa.float64()),
)

TABLES: Mapping[str, Table] = {
    # problem_id: content hash of problem and answer
    "problems": Table(_schema(*_PROBLEM), ("problem_id",)),
    # rows of the source that did not become problems: row number in the source, and why
    "excluded": Table(
        _schema(("row", pa.int64()), ("reason", pa.string()), ("problem", pa.string())), ("row", "reason")
    ),
    # token_ids and logprobs (nats, under the distribution sampled from) have one entry a sampled token, EOS included;
    # finish_reason: stop or length; verdict: correct, wrong, truncated, timeout, unparseable, or null where not graded
    "completions": Table(_schema(*_COMPLETION), ("problem_id", "sample"), ("token_ids", "logprobs")),
    # what halfmatch.responses keeps of a job: completions, and the text that was taken for the answer
    "responses": Table(
        _schema(*_COMPLETION, ("answer", pa.string(), True)), ("problem_id", "sample"), ("token_ids", "logprobs")
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
        ("token_ids", "logp_rollout", "logp_train"),
    ),
    # One row an optimizer step. Of its iteration's rollouts, the same in every row of it: reward (mean; time-outs left
    # out), response_tokens (mean length), truncated_responses and timeout_responses (shares); of dynamic sampling, the
    # problems_drawn and how many of the batch are mixed: have right and wrong responses. Of log π(θ') − log μ, in the
    # first row of an iteration alone, over all rollouts where the objective runs the π(θ') pass and over the first
    # step's share of them, where θ = θ', otherwise: k1 … ess_share (see halfmatch.mismatch.metrics; ess_share:
    # effective sample size over the number of sequences); there, too, merge_k3 and merge_lost, of the first
    # micro-batch, where an adapter is merged for the engine (see halfmatch.models.lora). Of the step: entropy (mean,
    # nats), the ratios π(θ)/π(θ') and the weights π/μ before (raw) and after their bound, the margins of pairs (see
    # halfmatch.rl.objectives), loss, gradient norm before clipping (NaN where a gradient was not finite), loss_scale of
    # the backward pass, skip_share (skipped of all steps so far), weight_change (|θ − θ_0| / |θ_0| after the step, in
    # the first steps), first_non_finite (tensor, where skipped), event (what a monitor said). Of the value model's step
    # on the same rows: value_loss, value_clip_share, explained_variance (before it; see halfmatch.rl.values) and
    # critic_…, as the policy's. Null: the objective, precision or step has no such number.
    "training_log": Table(
        _schema(
            ("iteration", pa.int32()),
            ("step", pa.int32()),
            *(
                (name, pa.float64())
                for name in ("reward", "response_tokens", "truncated_responses", "timeout_responses")
            ),
            ("problems_drawn", pa.int32(), True),
            ("mixed_problems", pa.int32(), True),
            *(
                (name, pa.float64(), True)
                for name in (
                    *("k1", "k2", "k3", "mean_abs_prob_diff", "max_prob_diff", "min_prob_diff"),
                    *("kl_sequence", "sigma", "ess_share", "probe_k3", "probe_mean_abs", "probe_max_abs"),
                    *("merge_k3", "merge_lost"),
                    *("entropy", "ratio_mean", "ratio_min", "ratio_max", "clip_low_share", "clip_high_share"),
                    *("weight_raw_mean", "weight_raw_min", "weight_raw_max"),
                    *("weight_mean", "weight_min", "weight_max", "truncated_share", "kept_share"),
                    *("preference_margin", "preference_accuracy"),
                )
            ),
            ("loss", pa.float64()),
            ("gradient_norm", pa.float64()),
            ("learning_rate", pa.float64()),
            ("loss_scale", pa.float64(), True),
            ("step_skipped", pa.bool_()),
            ("skip_share", pa.float64()),
            ("weight_change", pa.float64(), True),
            ("first_non_finite", pa.string(), True),
            *(
                (name, pa.float64(), True)
                for name in (
                    *("value_loss", "value_clip_share", "explained_variance"),
                    *("critic_gradient_norm", "critic_loss_scale"),
                )
            ),
            ("critic_step_skipped", pa.bool_(), True),
            ("critic_first_non_finite", pa.string(), True),
            ("event", pa.string(), True),
        ),
        ("step",),
    ),
    # per-problem counts of one evaluation; wrong_votes: how many samples gave each wrong answer, most first (for maj@k)
    "evaluation": Table(_schema(*_TALLY), ("problem_id",)),
    # the same along one training: after so many iterations, on a set of problems
    "validation": Table(
        _schema(("iteration", pa.int32()), ("problems", pa.string()), *_TALLY),
        ("iteration", "problems", "problem_id"),
    ),
}


@contextmanager
def atomic(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that appears under its name only when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = staging_path(path)
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
    try:
        with open(temporary, mode, encoding=encoding, newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and not error.filename:  # a write that fails names no file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """What compresses best of what Parquet has, as benchmarks/artifact_size.md measures it.

    Token ids stay plain: a dictionary's bit-packed indices hide repeated phrases from zstd. The bytes of log-probs are
    split into streams, since only signs and exponents repeat.
    """
    lists = {f"{field.name}.list.element": field.type for field in schema if pa.types.is_list(field.type)}
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    return {
        "use_dictionary": texts,
        "column_encoding": {name: "BYTE_STREAM_SPLIT" if kind == _LOGPROBS else "PLAIN" for name, kind in lists.items()}
        or None,
        "compression": "zstd",
        "compression_level": 9,
    }


class Writer:
    """Streams rows into one table; `with Writer(path, "completions", provenance) as out: out.write(rows)`.

    Rows arrive in the order of the table's key; what arrives out of order, twice, or not as declared raises ValueError.
    The file appears when the block ends without an error.
    """

    def __init__(self, path: Path, table: str, provenance: Mapping[str, Any]):
        self.path = Path(path)
        self.table = TABLES[table]
        header = {"table": table, "schema_version": SCHEMA_VERSION, **provenance}
        metadata = {PROVENANCE_KEY: json.dumps(header, sort_keys=True, ensure_ascii=False).encode()}
        self.schema = self.table.schema.with_metadata(metadata)
        self._last_key: tuple[Any, ...] | None = None
        self._columns: dict[str, list[Any]] = {name: [] for name in self.schema.names}
        self._rows = 0
        self._tokens = 0

    def __enter__(self) -> Writer:
        # Left in reverse order: the footer is written before the file is renamed, and an error in either stops both.
        with ExitStack() as stack:
            file = stack.enter_context(atomic(self.path))
            self._writer = stack.enter_context(
                pq.ParquetWriter(file, self.schema, write_page_checksum=True, **_encodings(self.schema))
            )
            stack.push(self._flush_at_end)
            self._stack = stack.pop_all()
        return self

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self._check(row)
            for field in self.schema:
                value = row.get(field.name)
                if pa.types.is_list(field.type):
                    value = pa.array(np.asarray(value), type=field.type.value_type)
                    self._tokens += len(value)
                self._columns[field.name].append(value)
            self._rows += 1
            if self._rows == ROWS_A_GROUP or self._tokens >= TOKENS_A_GROUP:
                self._flush()

    def _check(self, row: Mapping[str, Any]) -> None:
        if unknown := row.keys() - self._columns.keys():
            raise ValueError(f"{self.path}: undeclared columns {sorted(unknown)}; declared: {self.schema.names}")
        missing = [f.name for f in self.schema if not f.nullable and row.get(f.name) is None]
        if missing:
            raise ValueError(f"{self.path}: no value for {missing} in the row after {self._last_key}")
        key = tuple(row[name] for name in self.table.key)
        if self._last_key is not None and key <= self._last_key:
            raise ValueError(
                f"{self.path}: row {key} after {self._last_key}; rows are unique and sorted by {self.table.key}"
            )
        self._last_key = key
        lengths = {name: len(row[name]) for name in self.table.aligned}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{self.path}: row {key} has one entry a token in every column, but lengths {lengths}")

    def _flush(self) -> None:
        """Write what has gathered as one row group."""
        if self._rows:
            columns = [_column(self._columns[field.name], field.type) for field in self.schema]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=self.schema))
            self._columns = {name: [] for name in self.schema.names}
            self._rows = self._tokens = 0

    def _flush_at_end(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self._flush()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """One column of a row group; lists come as one array a row."""
    if not pa.types.is_list(kind):
        return pa.array(values, type=kind)
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.concat_arrays(values), type=kind)


def write(path: Path, table: str, rows: Iterable[Mapping[str, Any]], provenance: Mapping[str, Any]) -> None:
    """Write a whole table; rows are sorted by the table's key here."""
    key = TABLES[table].key
    with Writer(path, table, provenance) as out:
        out.write(sorted(rows, key=lambda row: tuple(row[name] for name in key)))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises on a missing or damaged file into a line for the user."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; the step that writes it has not run") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a complete Parquet file ({reason}); remove it and run its step again") from None


def _header(schema: pa.Schema) -> dict[str, Any]:
    try:
        header = json.loads((schema.metadata or {}).get(PROVENANCE_KEY, b"{}"))
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def open_table(path: Path, table: str) -> pq.ParquetFile:
    """Open a table after checking that it is one, whole, and of the declared schema; UserError otherwise."""
    with _readable(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
    header = _header(file.schema_arrow)
    if header.get("table") != table:
        raise UserError(f"{path}: holds {header.get('table', 'no table of halfmatch')!r}, where {table!r} is needed")
    if header.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {header.get('schema_version')}, and this halfmatch reads {SCHEMA_VERSION}; "
            "run its step again"
        )
    if not file.schema_arrow.equals(TABLES[table].schema):
        raise UserError(f"{path}: its columns differ from the declared table {table!r}; run its step again")
    return file


def read(path: Path, table: str, columns: list[str] | None = None) -> pa.Table:
    """Read a whole table, or some of its columns."""
    with open_table(path, table) as file, _readable(path):
        return file.read(columns=columns)


def row_groups(path: Path, table: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Read a table a row group at a time, in flat memory."""
    with open_table(path, table) as file:
        for group in range(file.num_row_groups):
            with _readable(path):
                content = file.read_row_group(group, columns=columns)
            yield content


def provenance(path: Path) -> dict[str, Any]:
    """What a Parquet or JSON artefact says of the inputs it came from."""
    if Path(path).suffix == ".json":
        return read_json(path)["provenance"]
    with _readable(path):
        return _header(pq.read_schema(path))


def write_json(path: Path, content: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write metrics: sorted keys, shortest exact floats, no NaN (null instead), provenance beside them."""
    with atomic(path, "w") as file:
        json.dump(_finite({**content, "provenance": provenance}), file, sort_keys=True, indent=1, allow_nan=False)
        file.write("\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read metrics that `write_json` wrote, provenance among them; UserError where the file is not such."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; the step that writes it has not run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); remove it and run its step again") from None
    if not isinstance(content, dict) or "provenance" not in content:
        raise UserError(f"{path}: not a file of halfmatch (no provenance in it); remove it and run its step again")
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return None
    return value
