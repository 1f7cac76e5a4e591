"""Sampling and grading: rows in order, seeds that name what they are for, the dtype that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from halfmatch import engines
from halfmatch.artifacts import TABLES
from halfmatch.config import Config, Sampling
from halfmatch.config_files import validate
from halfmatch.errors import UserError
from halfmatch.sampling import Response, Sampler

SHORT = Sampling(max_tokens=6)


def problems(count: int) -> pa.Table:
    rows = [
        {
            "problem_id": f"p{number}",
            "problem": f"{number}×2",
            "answer": str(2 * number),
            "source": "s",
            "split": "all",
            "level": None,
        }
        for number in reversed(range(count))
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["problems"].schema)


def sample(
    folder: Path, config: Config, purpose: str, *, count: int = 3, precision: str = "fp32", samples: int = 2
) -> list[Response]:
    with Sampler(config, folder, engine="transformers", precision=precision, sampling=SHORT) as sampler:
        assert sampler.provenance["dtype"] == precision
        return list(sampler.responses(problems(count), samples, purpose=purpose, label="test"))


def test_responses_come_by_problem_and_sample_whatever_the_order_of_the_table(tiny_model_folder: Path) -> None:
    responses = sample(tiny_model_folder, Config(), "rollouts")
    keys = [(response.problem_id, response.sample) for response in responses]
    assert keys == [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1), ("p2", 0), ("p2", 1)]
    for response in responses:
        row = response.row()
        assert set(row) == set(TABLES["completions"].schema.names)
        assert len(row["token_ids"]) == len(row["logprobs"])
        assert row["verdict"] == "truncated" if row["finish_reason"] == "length" else row["verdict"] != "truncated"


def test_what_is_sampled_for_different_purposes_differs_and_for_the_same_repeats(tiny_model_folder: Path) -> None:
    def tokens(purpose: str, **changes: Any) -> list[list[int]]:
        responses = sample(tiny_model_folder, validate(changes, ""), purpose)
        return [response.completion.token_ids for response in responses]

    assert tokens("rollouts") == tokens("rollouts")
    assert tokens("rollouts") != tokens("solvability")
    assert tokens("rollouts") != tokens("rollouts", seed=1)


def test_many_calls_of_the_engine_give_what_one_gives(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = validate({"engine": {"slots": 8}}, "")
    at_once = [response.row() for response in sample(tiny_model_folder, config, "rollouts", count=10)]
    monkeypatch.setattr("halfmatch.sampling.SLOT_FILLS_A_CALL", 1)
    assert [response.row() for response in sample(tiny_model_folder, config, "rollouts", count=10)] == at_once


def test_an_engine_that_computes_in_another_dtype_stops_the_run(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        dtype = "bf16"

        def close(self) -> None:
            pass

    monkeypatch.setattr(engines, "create", lambda *arguments: Other())
    with pytest.raises(UserError, match=r"transformers computes in bf16, and precisions\.fp16\.rollout asks for fp16"):
        sample(tiny_model_folder, Config(), "rollouts", precision="fp16")
