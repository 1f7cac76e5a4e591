"""Trainings on 1, 2 and 4 ranks, for real: processes that torchrun starts, gloo between them, FSDP2 in each."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from halfmatch.rl.ranks import ALONE, Ranks

sys.path.insert(0, str(Path(__file__).parent))
import ranked

SCRIPT = Path(ranked.__file__)
# Columns that are computed from responses, whose rounding does not depend on how rows are laid out in micro-batches.
EXACT = (
    "reward",
    "response_tokens",
    "truncated_responses",
    "step_skipped",
    "loss_scale",
    "learning_rate",
    "problems_drawn",
)


def test_shares_are_whole_and_in_order():
    items = list(range(7))
    for size in (1, 2, 3, 7, 9):
        shares = [list(Ranks(rank, size).share(items)) for rank in range(size)]
        assert [item for share in shares for item in share] == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_that_run_an_engine_together_have_one_share():
    shares = [list(Ranks(rank, 4).share(range(5), together=2)) for rank in range(4)]
    assert shares == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4]]


def test_one_process_alone_has_nobody_to_talk_to():
    tensor = torch.ones(3)
    assert ALONE.sum(tensor) is tensor
    assert ALONE.gather((1, 2)) == [1, 2]
    assert ALONE.first
    with pytest.raises(KeyError):
        ALONE.together(lambda: {}["missing"], KeyError)


@dataclass
class Outcome:
    folder: Path
    found: dict
    weights: dict


@pytest.fixture(scope="module")
def outcomes(tiny_model_folder, tmp_path_factory):
    """What `ranked.everything` gives on 1, 2 and 4 ranks; those of several also go on from the checkpoint of one."""
    root = tmp_path_factory.mktemp("ranks")
    made = {}
    for size in (1, 2, 4):
        folder = root / str(size)
        folder.mkdir()
        if size == 1:
            ranked.everything(tiny_model_folder, folder, ALONE)
        else:
            shutil.copytree(root / "1/left", folder / "of others")
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [*launch, str(SCRIPT), str(tiny_model_folder), str(folder)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-6000:]
        found = json.loads((folder / "results.json").read_text())
        made[size] = Outcome(folder, found, torch.load(folder / "weights.pt", weights_only=True))
    return made


RUNS = (
    *("fp32 grpo", "fp32 pg-seq-is", "fp32 gspo", "fp32 grpo sharded", "bf16 grpo", "fp16 pg-seq-is", "bf16 grpo lora"),
    *("fp32 ppo", "fp16 ppo", "fp32 dpo", "fp32 dapo"),
)
COMPARED = (
    *("loss", "gradient_norm", "entropy", "k3", "sigma", "ratio_max", "weight_change"),
    *("value_loss", "value_clip_share", "explained_variance", "critic_gradient_norm", "preference_margin"),
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_does_not_depend_on_the_number_of_ranks(outcomes, run, size):
    alone, many = outcomes[1].found[run], outcomes[size].found[run]
    assert len(alone) == len(many) == 4
    # 16-bit gradients are rounded a micro-batch, and the ranks cut the same rows into others.
    tolerance = 1e-4 if run.startswith("fp32") else 0.15
    for one, other in zip(alone, many, strict=True):
        assert {column: one[column] for column in EXACT} == {column: other[column] for column in EXACT}
        for column in COMPARED:
            assert (one[column] is None) == (other[column] is None), column
            if one[column] is not None:
                expected = pytest.approx(one[column], rel=tolerance, abs=tolerance / 10, nan_ok=True)
                assert other[column] == expected, column
    ours, theirs = (torch.cat([weight.flatten() for weight in outcomes[n].weights[run].values()]) for n in (size, 1))
    assert (ours - theirs).norm() / theirs.norm() < tolerance * alone[-1]["weight_change"]


@pytest.mark.slow
def test_in_16_bits_the_first_step_computes_the_same_logprobs_to_the_bit(outcomes):
    for run in ("bf16 grpo", "fp16 pg-seq-is"):
        for column in ("k1", "k3", "mean_abs_prob_diff", "max_prob_diff"):
            assert outcomes[2].found[run][0][column] == outcomes[1].found[run][0][column]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_engine_of_every_rank_has_the_weights_of_all_of_them(outcomes, size):
    rows = outcomes[size].found["probed"]
    first = [row for row in rows if row["probe_k3"] is not None]
    assert len(first) == 2  # one an iteration
    for row in first:
        assert 0 < row["probe_k3"] < 1e-3
    assert first[0]["probe_k3"] == outcomes[1].found["probed"][0]["probe_k3"]  # no step was made yet


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["overflow", "overflow, no clipping"])
def test_an_overflow_on_one_rank_makes_all_skip(outcomes, size, name):
    seen = outcomes[size].found[name]
    assert len(seen) == size
    for skipped, unchanged, scale, culprit in seen:
        assert skipped
        assert unchanged
        assert scale == 512.0
        assert culprit == seen[0][3]
        assert culprit.startswith("gradient of")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_engine_that_fails_on_one_rank_ends_the_run_on_all(outcomes, size):
    events = [row["event"] for row in outcomes[size].found["blind"]]
    assert events == [None, "stopped: the logits are not finite"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_killed_and_resumed_on_as_many_ranks_gives_the_same_bits(outcomes, size):
    outcome = outcomes[size]
    assert repr(outcome.found["parts"]) == repr(outcome.found["whole"])
    for name, weight in outcome.weights["whole"].items():
        assert torch.equal(outcome.weights["parts"][name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(outcomes, tiny_model_folder, size):
    whole = outcomes[1].weights["whole"]
    _, down = ranked.interrupted(tiny_model_folder, outcomes[size].folder / "left", ALONE, 4)
    for weights in (outcomes[size].weights["of others"], down):
        for name, weight in whole.items():
            torch.testing.assert_close(weights[name], weight, atol=5e-6, rtol=0, msg=name)


@pytest.mark.slow
def test_every_rank_writes_its_own_part_of_a_checkpoint(outcomes):
    files = {path.name for path in (outcomes[4].folder / "whole/iteration-00000004").iterdir()}
    shards = {f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors" for rank in range(4)}
    assert files == {"state.json", *shards, *(f"random-{rank}.json" for rank in range(4))}
