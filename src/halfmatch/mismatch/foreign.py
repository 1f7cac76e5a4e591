"""Rollouts that others made: token ids and log-probs from dumps of verl, TRL, slime and vLLM, or of anything alike.

A file is Parquet, JSONL or JSON (a list of objects), one response a row. `docs/measure.md` lists the columns. Every
column goes by one of the names in COLUMNS; padding and tokens that the model did not sample (tool results) are left out
by the product of all masks that a row has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmatch.errors import UserError

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

# What we call a column, and what others call it; the first that a row has is taken.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "prompts"),
    "token_ids": (
        "token_ids",
        "completion_ids",
        "completion_token_ids",
        "response_ids",
        "response_token_ids",
        "responses",
        "output_ids",
    ),
    "logprobs": (
        "logprobs",
        "logp_rollout",
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "completion_logprobs",
        "token_logprobs",
    ),
    "logp_train": ("logp_train", "old_log_probs", "old_per_token_logps"),
    "problem_id": ("problem_id", "uid", "group_index", "prompt_id"),
    "prompt_mask": ("prompt_mask",),
    "attention_mask": ("attention_mask",),
}
# 1 where a response token was sampled and counts. All that a row has are multiplied.
MASKS = ("response_mask", "completion_mask", "tool_mask", "loss_mask", "mask")
# A log-prob may be above 0 by rounding, and not by more.
LARGEST_LOGPROB = 1e-3


@dataclass(frozen=True)
class Rollout:
    """One response. `token_ids` and `sampled` have an entry for every token after the prompt, log-probs likewise."""

    problem_id: str
    prompt_ids: list[int] | None
    token_ids: list[int]
    sampled: BoolArray  # the tokens that the model sampled
    logp_rollout: FloatArray  # log μ, nats
    logp_train: FloatArray | None  # log π as the trainer recorded it, where it did


def read(path: Path, columns: Mapping[str, str] | None = None) -> list[Rollout]:
    """The responses of a file. `columns` names columns that go by none of the known names, as {"logprobs": "my_logps"}.

    A response without a sampled token (one that was masked as a whole) is left out. What is missing or does not fit
    raises UserError with the row.
    """
    unknown = set(columns or {}) - set(COLUMNS) - {"mask"}
    if unknown:
        raise UserError(f"--columns: {', '.join(sorted(unknown))}: known are {', '.join([*COLUMNS, 'mask'])}")
    rollouts = []
    for number, raw in enumerate(read_rows(path)):
        for row in _responses(raw):
            rollout = _rollout(_Row(row, columns or {}, f"{path}: row {number}"))
            if rollout.sampled.any():
                rollouts.append(rollout)
    if not rollouts:
        raise UserError(f"{path}: there are no responses with sampled tokens in it")
    return rollouts


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet, JSONL or JSON file as dictionaries."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _parquet_rows(path)
    elif kind == ".jsonl":
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _object(_parse(line, f"{path}: line {number}"), f"{path}: line {number}")
    elif kind == ".json":
        content = _parse(path.read_text(encoding="utf-8-sig"), str(path))
        for number, row in enumerate(content if isinstance(content, list) else [content]):
            yield _object(row, f"{path}: row {number}")
    else:
        raise UserError(f"{path}: cannot tell its format; the name has to end in .parquet, .jsonl or .json")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error})") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} is a {type(value).__name__}, where an object is needed")
    return value


def _responses(row: dict[str, Any]) -> list[dict[str, Any]]:
    """vLLM keeps the responses to a prompt in a list beside it: `outputs` offline, `choices` from a server."""
    for name in ("outputs", "choices"):
        if isinstance(row.get(name), list) and row[name] and isinstance(row[name][0], dict):
            outer = {key: value for key, value in row.items() if key != name}
            return [{**outer, **response} for response in row[name]]
    return [row]


class _Row:
    """One response's columns, by our names for them."""

    def __init__(self, values: Mapping[str, Any], columns: Mapping[str, str], where: str):
        self._values, self._columns, self.where = values, columns, where

    def get(self, name: str) -> Any:
        if name in self._columns:
            column = self._columns[name]
            if column not in self._values:
                raise UserError(f"{self.where} has no column {column!r}; it has {', '.join(self._values)}")
            return self._values[column]
        return next((self._values[known] for known in COLUMNS[name] if self._values.get(known) is not None), None)

    def masks(self) -> list[Any]:
        names = [self._columns["mask"]] if "mask" in self._columns else MASKS
        return [self._values[name] for name in names if self._values.get(name) is not None]

    def column(self, name: str) -> Any:
        return self._values.get(name)

    def missing(self, name: str) -> UserError:
        text = [column for column, value in self._values.items() if isinstance(value, str)]
        advice = (
            f"; {', '.join(text)} hold text, and text that is tokenised again is not what was sampled: dump token ids"
            if text
            else ""
        )
        return UserError(
            f"{self.where} has no {name} (a list under one of the names {', '.join(COLUMNS[name])}); it has "
            f"{', '.join(self._values)}{advice}"
        )


def _rollout(row: _Row) -> Rollout:
    prompt_ids, token_ids, attended = _tokens(row)
    logprobs = row.get("logprobs")
    if isinstance(logprobs, Mapping):  # a server's completion keeps several lists there
        logprobs = logprobs.get("token_logprobs")
    if logprobs is None:
        raise row.missing("logprobs")
    logp_rollout = _logprobs(row, "logprobs", logprobs, token_ids)
    train = row.get("logp_train")
    logp_train = None if train is None else _logprobs(row, "logp_train", train, token_ids)
    sampled = _sampled(row, token_ids, logp_rollout, attended)
    for name, values in (("logprobs", logp_rollout), ("logp_train", logp_train)):
        if values is not None and (values[sampled] > LARGEST_LOGPROB).any():
            raise UserError(f"{row.where}: {name} are above 0, as probabilities are; log-probs are needed, in nats")
    # What stands behind the last sampled token is padding.
    end = int(np.flatnonzero(sampled)[-1]) + 1 if sampled.any() else 0
    problem_id = row.get("problem_id")
    if problem_id is None:
        named = json.dumps(prompt_ids if prompt_ids is not None else row.column("prompt"))
        problem_id = hashlib.sha256(named.encode()).hexdigest()[:16]
    return Rollout(
        problem_id=str(problem_id),
        prompt_ids=prompt_ids,
        token_ids=token_ids[:end],
        sampled=sampled[:end],
        logp_rollout=logp_rollout[:end],
        logp_train=None if logp_train is None else logp_train[:end],
    )


def _tokens(row: _Row) -> tuple[list[int] | None, list[int], BoolArray | None]:
    """Prompt, response, and which of the response's tokens an attention mask over both shows, if there is one.

    slime has prompt and response in one list, of which the last response_length are the response.
    """
    token_ids, prompt_ids = row.get("token_ids"), row.get("prompt_ids")
    together, length = row.column("tokens"), row.column("response_length")
    if token_ids is None and together is not None and length is not None:
        together = _ids(row, "tokens", together)
        if not 0 <= length <= len(together):
            raise UserError(f"{row.where}: response_length is {length}, and there are {len(together)} tokens")
        return together[: len(together) - length], together[len(together) - length :], None
    if token_ids is None:
        raise row.missing("token_ids")
    token_ids = _ids(row, "token_ids", token_ids)
    if prompt_ids is None or isinstance(prompt_ids, str):
        return None, token_ids, None
    prompt_ids = _ids(row, "prompt_ids", prompt_ids)
    prompt_mask, attention_mask = row.get("prompt_mask"), row.get("attention_mask")
    attended = None
    if attention_mask is not None:
        both = _flags(row, "attention_mask", attention_mask, [*prompt_ids, *token_ids])
        kept, attended = both[: len(prompt_ids)], both[len(prompt_ids) :]
    elif prompt_mask is not None:
        kept = _flags(row, "prompt_mask", prompt_mask, prompt_ids)
    else:
        return prompt_ids, token_ids, None
    return [token for token, keep in zip(prompt_ids, kept, strict=True) if keep], token_ids, attended


def _sampled(row: _Row, token_ids: Sequence[int], logp_rollout: FloatArray, attended: BoolArray | None) -> BoolArray:
    """Where a token counts: the product of the row's masks, everywhere if it has none."""
    masks = [_flags(row, "a mask", mask, token_ids) for mask in row.masks()]
    if attended is not None:
        masks.append(attended)
    if masks:
        return np.logical_and.reduce(masks)
    padded = len(token_ids) > 2 and token_ids[-2] == token_ids[-1] and not logp_rollout[-2:].any()
    if padded:
        raise UserError(
            f"{row.where} ends in tokens {token_ids[-1]} with log-probs of exactly 0, as padding does, and has no "
            f"mask; add one ({', '.join(MASKS)}), or cut the padding off"
        )
    return np.ones(len(token_ids), dtype=bool)


def _flags(row: _Row, name: str, values: Sequence[Any], tokens: Sequence[int]) -> BoolArray:
    if len(values) != len(tokens):
        raise UserError(f"{row.where}: {name} has {len(values)} entries for {len(tokens)} tokens")
    return np.asarray(values, dtype=np.float64) != 0


def _ids(row: _Row, name: str, values: Any) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(f"{row.where}: {name} is a {type(values).__name__}, where a list of token ids is needed")
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise UserError(f"{row.where}: {name} holds something else than token ids")
    return list(values)


def _logprobs(row: _Row, name: str, values: Any, token_ids: Sequence[int]) -> FloatArray:
    """Log-probs of the tokens; vLLM's own objects have, for each position, a dictionary of tokens and theirs."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(f"{row.where}: {name} is a {type(values).__name__}, where a list of log-probs is needed")
    if len(values) != len(token_ids):
        raise UserError(f"{row.where}: {name} has {len(values)} entries for {len(token_ids)} tokens")
    if values and isinstance(values[0], Mapping):
        values = [_of_token(row, name, entry, token) for entry, token in zip(values, token_ids, strict=True)]
    if not all(isinstance(value, int | float) for value in values):
        raise UserError(f"{row.where}: {name} holds something else than numbers")
    return np.asarray(values, dtype=np.float32)


def _of_token(row: _Row, name: str, entry: Mapping[str, Any], token: int) -> float:
    found = entry.get(str(token))
    if found is None:
        raise UserError(f"{row.where}: {name} has no log-prob of the sampled token {token} at one of its positions")
    return found["logprob"] if isinstance(found, Mapping) else found
