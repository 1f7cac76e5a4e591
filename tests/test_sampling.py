"""Sampling and grading: rows in order, seeds that name what they are for, the dtype that was asked for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from halfmatch import engines
from halfmatch.artifacts import TABLES
from halfmatch.config import Config, Sampling
from halfmatch.config_files import validate
from halfmatch.engines.transformers import TransformersEngine
from halfmatch.errors import UserError
from halfmatch.responses import KeptResponses, Response
from halfmatch.sampling import Sampler

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
    folder: Path,
    config: Config,
    purpose: str,
    *,
    count: int = 3,
    precision: str = "fp32",
    samples: int = 2,
    kept: Path | None = None,
) -> list[Response]:
    with (
        Sampler(config, folder, engine="transformers", precision=precision, sampling=SHORT) as sampler,
        tempfile.TemporaryDirectory() as temporary,
    ):
        assert sampler.provenance["dtype"] == precision
        responses = KeptResponses(kept or Path(temporary), {})
        return list(sampler.responses(problems(count), samples, kept=responses, purpose=purpose, label="test"))


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


class Asked:
    """Counts the requests that an engine gets, and dies in a call if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_in: int | None = None):
        self.requests: list[int] = []
        generate = TransformersEngine.generate

        def counted(engine: Any, requests: Any, *arguments: Any, **options: Any) -> Any:
            if len(self.requests) + 1 == dies_in:
                raise KeyboardInterrupt
            self.requests.append(len(requests))
            return generate(engine, requests, *arguments, **options)

        monkeypatch.setattr(TransformersEngine, "generate", counted)


def rows(responses: list[Response]) -> list[dict[str, Any]]:
    return [response.row() for response in responses]


def test_more_samples_sample_the_new_ones_alone_and_give_what_all_at_once_give(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(sample(tiny_model_folder, Config(), "solvability", samples=5))
    asked = Asked(monkeypatch)
    first = rows(sample(tiny_model_folder, Config(), "solvability", samples=2, kept=tmp_path))
    assert first == [row for row in whole if row["sample"] < 2]
    assert rows(sample(tiny_model_folder, Config(), "solvability", samples=5, kept=tmp_path)) == whole
    assert asked.requests == [6, 9]
    assert rows(sample(tiny_model_folder, Config(), "solvability", samples=2, kept=tmp_path)) == first
    assert asked.requests == [6, 9]


def test_what_was_sampled_before_a_kill_is_not_sampled_again(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validate({"engine": {"slots": 8}}, "")
    whole = rows(sample(tiny_model_folder, config, "solvability", count=10))
    monkeypatch.setattr("halfmatch.sampling.SLOT_FILLS_A_CALL", 1)
    with monkeypatch.context() as patch:
        Asked(patch, dies_in=3)
        with pytest.raises(KeyboardInterrupt):
            sample(tiny_model_folder, config, "solvability", count=10, kept=tmp_path)
    asked = Asked(monkeypatch)
    assert rows(sample(tiny_model_folder, config, "solvability", count=10, kept=tmp_path)) == whole
    assert asked.requests == [4]


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
