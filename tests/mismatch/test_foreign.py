"""Rollouts that others made, as each of them writes them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from halfmatch.errors import UserError
from halfmatch.mismatch import foreign

# One response: prompt 11 12, tokens 21 22 23, and log-probs of engine and trainer.
PROMPT, TOKENS = [11, 12], [21, 22, 23]
ENGINE, TRAINER = [-0.5, -1.5, -2.5], [-0.25, -1.75, -2.5]

VERL = {  # left-padded prompts, right-padded responses, one attention mask over both
    "prompts": [0, 0, *PROMPT],
    "responses": [*TOKENS, 0, 0],
    "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0, 0],
    "response_mask": [1, 1, 1, 0, 0],
    "rollout_log_probs": [*ENGINE, 0.0, 0.0],
    "old_log_probs": [*TRAINER, -7.0, -7.0],
    "uid": "b7",
}
TRL = {
    "prompt_ids": [0, *PROMPT],
    "prompt_mask": [0, 1, 1],
    "completion_ids": [*TOKENS, 0],
    "completion_mask": [1, 1, 1, 0],
    "sampling_per_token_logps": [*ENGINE, 0.0],
    "old_per_token_logps": [*TRAINER, 0.0],
}
SLIME = {
    "tokens": [*PROMPT, *TOKENS],
    "response_length": 3,
    "loss_mask": [1, 1, 1],
    "rollout_log_probs": ENGINE,
    "group_index": 4,
}
VLLM_OFFLINE = {
    "prompt_token_ids": PROMPT,
    "outputs": [
        {
            "token_ids": TOKENS,
            "logprobs": [
                {str(token): {"logprob": logprob, "rank": 1}, "99": {"logprob": -9.0, "rank": 2}}
                for token, logprob in zip(TOKENS, ENGINE, strict=True)
            ],
        }
    ],
}
VLLM_SERVER = {
    "choices": [
        {
            "prompt_token_ids": PROMPT,
            "token_ids": TOKENS,
            "logprobs": {"token_logprobs": ENGINE, "tokens": ["a", "b", "c"]},
        }
    ]
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize(
    "row", [VERL, TRL, SLIME, VLLM_OFFLINE, VLLM_SERVER], ids=["verl", "trl", "slime", "llm", "server"]
)
def test_every_dump_is_the_same_response(tmp_path: Path, row: dict[str, Any], suffix: str) -> None:
    if row is VLLM_OFFLINE and suffix == ".parquet":
        pytest.skip("a dictionary by token is no Parquet column")
    (rollout,) = foreign.read(write(tmp_path / f"dump{suffix}", [row]))
    assert rollout.prompt_ids == PROMPT
    assert rollout.token_ids == TOKENS
    assert rollout.sampled.all()
    np.testing.assert_array_equal(rollout.logp_rollout, np.float32(ENGINE))
    if row in (VERL, TRL):
        assert rollout.logp_train is not None
        np.testing.assert_array_equal(rollout.logp_train, np.float32(TRAINER))
    else:
        assert rollout.logp_train is None


def test_responses_to_one_prompt_belong_together(tmp_path: Path) -> None:
    own = {"prompt_ids": PROMPT, "token_ids": TOKENS, "logprobs": ENGINE}
    other = {**own, "prompt_ids": [11, 13]}
    named = [{**own, "uid": "x"}, {**own, "uid": "y"}]
    first, second, third = foreign.read(write(tmp_path / "a.jsonl", [own, other, own]))
    assert first.problem_id == third.problem_id != second.problem_id
    assert [rollout.problem_id for rollout in foreign.read(write(tmp_path / "b.jsonl", named))] == ["x", "y"]
    several = {"prompt_token_ids": PROMPT, "outputs": VLLM_OFFLINE["outputs"] * 2}
    assert len({rollout.problem_id for rollout in foreign.read(write(tmp_path / "c.jsonl", [several]))}) == 1


def test_tokens_of_tools_stay_in_the_context_and_do_not_count(tmp_path: Path) -> None:
    row = {
        **TRL,
        "completion_ids": [21, 50, 51, 22, 0],
        "completion_mask": [1, 1, 1, 1, 0],
        "tool_mask": [1, 0, 0, 1, 1],
        "sampling_per_token_logps": [-0.5, 0.0, 0.0, -1.5, 0.0],
        "old_per_token_logps": [-0.5, -3.0, -3.0, -1.5, 0.0],
    }
    (rollout,) = foreign.read(write(tmp_path / "dump.jsonl", [row]))
    assert rollout.token_ids == [21, 50, 51, 22]
    assert rollout.sampled.tolist() == [True, False, False, True]


def test_a_response_that_is_masked_as_a_whole_is_left_out(tmp_path: Path) -> None:
    masked = {**VERL, "response_mask": [0] * 5}
    assert len(foreign.read(write(tmp_path / "dump.parquet", [masked, VERL]))) == 1
    with pytest.raises(UserError, match="no responses with sampled tokens"):
        foreign.read(write(tmp_path / "none.parquet", [masked]))


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "dump.jsonl", [{"p": PROMPT, "t": TOKENS, "lp": ENGINE, "m": [1, 1, 0]}])
    columns = {"prompt_ids": "p", "token_ids": "t", "logprobs": "lp", "mask": "m"}
    (rollout,) = foreign.read(path, columns)
    assert rollout.token_ids == TOKENS[:2]
    with pytest.raises(UserError, match="no column 'nope'"):
        foreign.read(path, {**columns, "logprobs": "nope"})
    with pytest.raises(UserError, match="log_probs: known are prompt_ids, token_ids, logprobs"):
        foreign.read(path, {"log_probs": "lp"})


OWN = {"prompt_ids": PROMPT, "token_ids": TOKENS, "logprobs": ENGINE}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "output": "there", "score": 1.0}, "no token_ids.*prompt, output hold text"),
        ({"prompt_ids": PROMPT, "token_ids": TOKENS}, "no logprobs"),
        ({**OWN, "logprobs": ENGINE[:2]}, "logprobs has 2 entries for 3 tokens"),
        ({**OWN, "logprobs": [0.6, 0.2, 0.1]}, "above 0"),
        ({**OWN, "logprobs": [None, -1.0, -1.0]}, "something else than numbers"),
        ({**OWN, "token_ids": [21, -1, 23]}, "something else than token ids"),
        ({**OWN, "token_ids": "abc"}, "token_ids is a str"),
        ({**OWN, "loss_mask": [1, 1]}, "2 entries for 3 tokens"),
        ({**OWN, "token_ids": [21, 0, 0], "logprobs": [-0.5, 0.0, 0.0]}, "as padding does"),
        ({**SLIME, "response_length": 9}, "response_length is 9"),
        ({**OWN, "logprobs": [{"7": -1.0}] * 3}, "no log-prob of the sampled token 21"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"row 0.*{message}"):
        foreign.read(write(tmp_path / "dump.jsonl", [row]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dump.csv", "a,b", "cannot tell its format"),
        ("dump.jsonl", "{", "line 1 is not JSON"),
        ("dump.jsonl", "[1]", "line 1 is a list"),
        ("dump.json", "[1]", "row 0 is a int"),
        ("dump.parquet", "PAR", "not readable as Parquet"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        foreign.read(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        foreign.read(tmp_path / "other.jsonl")
