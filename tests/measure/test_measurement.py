"""Whole measurements of the tiny model: sampled here, and from the dumps of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from halfmatch import artifacts, models
from halfmatch.cli import main
from halfmatch.config import EngineSettings
from halfmatch.errors import UserError
from halfmatch.measure.measurement import run
from halfmatch.measure.options import Settings
from halfmatch.rl.scoring import response_logprobs

SMALL = {"count": 6, "samples": 2, "max_tokens": 12, "problems": "generator", "bootstrap_samples": 100}
ENGINE = EngineSettings(slots=8)


def measure(output: Path, **changes: Any) -> str:
    return run(Settings(output=output, engine=ENGINE, **{**SMALL, **changes}))


@pytest.fixture(scope="module")
def sampled(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A measurement of bf16 rollouts, scored in bf16 and fp32: its folder and what it says."""
    output = tmp_path_factory.mktemp("measured")
    text = measure(output, model=str(tiny_model_folder), rollout_dtypes=("bf16",), train_dtypes=("bf16", "fp32"))
    return output, text


def scores_of(output: Path, engine: str, rollout: str, train: str) -> list[dict[str, Any]]:
    (path,) = output.glob(f"mismatch/*/prompts/{engine}-{rollout}/{train}/scores.parquet")
    return artifacts.read(path, "scores").to_pylist()


def rollouts_of(output: Path) -> list[dict[str, Any]]:
    (path,) = output.glob("mismatch/*/prompts/transformers-bf16/rollouts.parquet")
    return artifacts.read(path, "completions").to_pylist()


def test_everything_that_was_measured_is_written(sampled: tuple[Path, str]) -> None:
    output, text = sampled
    for train in ("bf16", "fp32"):
        (folder,) = output.glob(f"mismatch/*/prompts/transformers-bf16/{train}")
        assert {path.name for path in folder.iterdir()} == {"scores.parquet", "mismatch.json", "curves.csv"}
        assert artifacts.provenance(folder / "scores.parquet")["dtype"] == train
    assert {path.suffix for path in (output / "figures").iterdir()} == {".png", ".svg"}
    assert text.startswith((output / "measure.txt").read_text().rstrip())
    assert str(output) in text


def test_the_summary_says_what_the_scores_hold(sampled: tuple[Path, str]) -> None:
    output, text = sampled
    first, second = json.loads((output / "measure.json").read_text())["cells"]
    assert (first["rollout"], first["train"]) == ("bf16", "bf16")
    assert (second["rollout"], second["train"]) == ("bf16", "fp32")
    rows = scores_of(output, "transformers", "bf16", "fp32")
    assert len(rows) == second["sequences"] == SMALL["count"] * SMALL["samples"]
    d = np.concatenate([np.float64(row["logp_train"]) - np.float64(row["logp_rollout"]) for row in rows])
    k3 = np.mean(np.exp(d) - 1 - d)
    assert second["metrics"]["k3"]["value"] == pytest.approx(k3)
    assert second["ess_share_after"]["8192"]["value"] == pytest.approx(np.exp(-2 * 8192 * k3))
    for part in ("bf16 → fp32", "Token-level", "Sequence-level", "Half of the samples", "mismatch is smallest"):
        assert part in text


def test_the_same_again_is_the_same_bytes(sampled: tuple[Path, str], tiny_model_folder: Path, tmp_path: Path) -> None:
    output, _ = sampled
    measure(tmp_path, model=str(tiny_model_folder), rollout_dtypes=("bf16",), train_dtypes=("bf16", "fp32"))
    for path in output.glob("**/*.*"):
        again = tmp_path / path.relative_to(output)
        if path.is_file() and "models" not in path.parts:
            assert again.read_bytes() == path.read_bytes(), path.name


def test_dumps_of_others_measure_the_same(sampled: tuple[Path, str], tiny_model_folder: Path, tmp_path: Path) -> None:
    """The same rollouts as verl would write them, padded; in another order of rows."""
    output, _ = sampled
    prompt_room = max(len(row["prompt_ids"]) for row in rollouts_of(output))
    room = SMALL["max_tokens"] + 3
    dump = []
    for row in reversed(rollouts_of(output)):
        prompt, tokens = row["prompt_ids"], row["token_ids"]
        left, right = prompt_room - len(prompt), room - len(tokens)
        dump.append(
            {
                "prompts": [0] * left + prompt,
                "responses": tokens + [0] * right,
                "attention_mask": [0] * left + [1] * (len(prompt) + len(tokens)) + [0] * right,
                "response_mask": [1] * len(tokens) + [0] * right,
                "rollout_log_probs": row["logprobs"] + [0.0] * right,
                "uid": row["problem_id"],
            }
        )
    path = tmp_path / "verl.parquet"
    pq.write_table(pa.Table.from_pylist(dump), path)
    measure(tmp_path / "out", model=str(tiny_model_folder), rollouts=path, train_dtypes=("fp32",))

    def comparable(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return sorted(
            (row["problem_id"], tuple(row["token_ids"]), tuple(row["logp_rollout"]), tuple(row["logp_train"]))
            for row in rows
        )

    ours = comparable(scores_of(output, "transformers", "bf16", "fp32"))
    theirs = comparable(scores_of(tmp_path / "out", "others", "recorded", "fp32"))
    assert [row[:3] for row in ours] == [row[:3] for row in theirs]
    for (*_, mine), (*_, other) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_log_probs_of_both_sides_need_no_model(sampled: tuple[Path, str], tmp_path: Path) -> None:
    output, _ = sampled
    path = tmp_path / "trl.jsonl"
    rows = scores_of(output, "transformers", "bf16", "fp32")
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "completion_ids": row["token_ids"],
                    "sampling_per_token_logps": row["logp_rollout"],
                    "old_per_token_logps": row["logp_train"],
                    "prompt_id": row["problem_id"],
                }
            )
            for row in rows
        )
    )
    measure(tmp_path / "out", rollouts=path)
    ours = json.loads((output / "measure.json").read_text())["cells"][1]
    theirs = json.loads((tmp_path / "out" / "measure.json").read_text())["cells"][0]
    assert theirs["metrics"] == ours["metrics"]


def test_tokens_of_tools_are_context_and_not_measured(tiny_model_folder: Path, tmp_path: Path) -> None:
    prompt, tokens, mask = [2, 3, 4], [5, 6, 7, 8, 9], [1, 0, 0, 1, 1]
    logprobs = [-1.0, 0.0, 0.0, -2.0, -3.0]
    row = {"prompt_ids": prompt, "token_ids": tokens, "logprobs": logprobs, "loss_mask": mask}
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "prompt_ids": [2, 3, 5]}))
    measure(tmp_path / "out", model=str(tiny_model_folder), rollouts=path, train_dtypes=("fp32",))
    found = scores_of(tmp_path / "out", "others", "recorded", "fp32")
    (expected,) = response_logprobs(
        models.load(tiny_model_folder, torch.float32), [prompt], [tokens], micro_batch_tokens=64
    )
    (row,) = [row for row in found if np.allclose(row["logp_train"], expected[[0, 3, 4]], atol=1e-5)]
    assert row["token_ids"] == [5, 8, 9]
    assert row["logp_rollout"] == [-1.0, -2.0, -3.0]


def test_what_is_missing_for_a_measurement_is_said(tiny_model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps({"token_ids": [5, 6], "logprobs": [-1.0, -2.0]}))
    with pytest.raises(UserError, match=r"1 of 1 responses have no log-probs of the trainer.*give the model"):
        measure(tmp_path / "out", rollouts=path)
    with pytest.raises(UserError, match="scoring needs prompts as token ids"):
        measure(tmp_path / "out", model=str(tiny_model_folder), rollouts=path)


def test_the_command_line(tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["measure", str(tiny_model_folder), "--device", "cpu", "--problems", "generator", "--count", "2"]
    small = ["--samples", "2", "--max-tokens", "4", "--rollout-dtypes", "fp16", "--output", str(tmp_path / "out")]
    assert main([*arguments, *small]) == 0
    assert "usable length" in capsys.readouterr().out
    assert main(["measure"]) == 2
    assert "give a MODEL" in capsys.readouterr().err


@pytest.mark.vllm
def test_vllm_is_measured_like_any_engine(tiny_model_folder: Path, tmp_path: Path) -> None:
    settings = EngineSettings(name="vllm", slots=8, gpu_memory=0.2)
    text = run(Settings(output=tmp_path, model=str(tiny_model_folder), engine=settings, **{**SMALL, "max_tokens": 32}))
    bf16, fp16 = json.loads((tmp_path / "measure.json").read_text())["cells"]
    assert bf16["metrics"]["k3"]["value"] > 10 * fp16["metrics"]["k3"]["value"] > 0
    assert "on vllm" in text


def test_of_a_mixture_of_experts_it_says_how_often_both_sides_take_the_same_ones(
    tiny_moe_folder: Path, sampled: tuple[Path, str], tmp_path: Path
) -> None:
    text = measure(tmp_path, model=str(tiny_moe_folder), rollout_dtypes=("bf16",), train_dtypes=("bf16", "fp32"))
    (row,) = [line for line in text.splitlines() if line.startswith("same experts, tokens × layers")]
    assert row.count("%") == 2
    (path,) = tmp_path.glob("mismatch/*/prompts/transformers-bf16/bf16/mismatch.json")
    found = artifacts.read_json(path)["router_agreement"]
    assert found["responses"] == SMALL["count"]
    assert 0.5 < found["share"]["low"] <= found["share"]["value"] <= 1
    cells = json.loads((tmp_path / "measure.json").read_text())["cells"]
    assert [cell["train"] for cell in cells] == ["bf16", "fp32"]
    assert cells[0]["router_agreement"] == found
    assert "same experts" not in sampled[1]
