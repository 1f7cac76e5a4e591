"""What is there is read, what is missing is named, what is broken is an error to act on."""

import shutil
from pathlib import Path

import pytest

from halfmatch.errors import UserError
from halfmatch.paths import Paths
from halfmatch.report.results import collect, estimate


@pytest.fixture
def copy(finished, synthetic, tmp_path):
    """The finished run where a test may change it."""
    shutil.copytree(finished.output, tmp_path / "run")
    return synthetic.config(tmp_path / "run")


def test_everything_is_there(results):
    assert results.missing == []
    assert len(results.cells) == 4
    assert len(results.runs) == 12
    assert len(results.evaluations) == 2 * 28  # by the engine, and by the trainer
    assert [setup.model for setup in results.setups] == ["gain16", "gain120"]
    assert results.matrix == [("bf16", "grpo"), ("bf16", "pg-seq-is"), ("fp16", "grpo"), ("fp16", "pg-seq-is")]


def test_every_missing_file_is_named_with_the_command_that_makes_it(copy):
    paths = Paths(Path(copy.output))
    paths.of("training_log", run="fp16_grpo_seed1").unlink()
    names = {"model": "gain16", "problems": "all", "engine": "transformers", "rollout": "bf16", "train": "bf16"}
    paths.of("mismatch", **names).unlink()
    found = collect(copy)
    assert {(one.path, one.command) for one in found.missing} == {
        ("train/fp16_grpo_seed1/log.parquet", "halfmatch train --run fp16_grpo_seed1"),
        (
            "mismatch/gain16/all/transformers-bf16/bf16/mismatch.json",
            "halfmatch mismatch --model gain16 --problems all --engine transformers --rollout bf16 --train bf16",
        ),
    }
    assert len(found.cells) == 3
    assert len(found.runs) == 11


def test_nothing_is_there(synthetic, tmp_path):
    found = collect(synthetic.config(tmp_path))
    assert not found.cells
    assert not found.runs
    assert found.perfectible is None
    steps = {one.step for one in found.missing}
    assert steps == {"mismatch", "fidelity", "scores", "rollouts", "train", "evaluate", "perfectible", "problems"}


def test_what_is_not_asked_for_is_not_missing(synthetic, tmp_path):
    config = synthetic.config(tmp_path, training=None, evaluation=None)
    config = config.model_copy(
        update={
            "mismatch": config.mismatch.model_copy(
                update={"gradient_fidelity": config.mismatch.gradient_fidelity.model_copy(update={"enabled": False})}
            )
        }
    )
    assert not {"train", "evaluate", "fidelity"} & {one.step for one in collect(config).missing}


@pytest.mark.parametrize(
    ("artefact", "names"),
    [
        ("training_log", {"run": "fp16_grpo_seed1"}),
        ("perfectible", {}),
        (
            "mismatch",
            {"model": "gain16", "problems": "all", "engine": "transformers", "rollout": "bf16", "train": "bf16"},
        ),
    ],
)
def test_a_broken_file_is_named_with_what_to_do(copy, artefact, names):
    path = Paths(Path(copy.output)).of(artefact, **names)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{path.name}.*run its step again"):
        collect(copy)


def test_setups_are_told_apart_by_what_differs(results):
    assert [results.setup_label(setup) for setup in results.setups] == ["gain16", "gain120"]


def test_null_is_not_a_number():
    value, low, high = estimate({"value": 1.5, "low": None, "high": None})
    assert value == 1.5
    assert low != low
    assert high != high
    assert estimate(None)[0] != estimate(None)[0]
