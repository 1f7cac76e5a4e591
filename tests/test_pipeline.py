"""What a training run asks a scheduler for, and how it is started."""

from __future__ import annotations

from typing import Any

import pytest

from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.pipeline import Pipeline


def pipeline(training: dict[str, Any] | None, device: str = "cuda", **engine: Any) -> Pipeline:
    values = {"training": training, "engine": {"device": device, **engine}}
    return Pipeline(validate(values, ""), ())


@pytest.mark.parametrize(
    ("training", "engine", "gpus"),
    [
        ({"ranks": 4}, {"device": "cpu"}, 0),
        ({}, {}, 1),
        ({"ranks": 4}, {}, 4),
        ({}, {"data_parallel": 2}, 2),
        (None, {}, 1),
    ],
)
def test_on_one_node_it_asks_for_gpus(training: dict[str, Any] | None, engine: dict[str, Any], gpus: int) -> None:
    asked = pipeline(training, **engine)
    assert asked.training_resources() == {"gpu": gpus}
    assert asked.training_command == "halfmatch train"


def test_only_a_model_that_is_trained_here_asks_for_a_gpu() -> None:
    fetched = {"source": "hub", "id": "some/model", "revision": "0" * 40}
    models = {**Config().model_dump(mode="json")["models"], "fetched": fetched}
    asked = Pipeline(validate({"models": models, "engine": {"device": "cuda", "data_parallel": 2}}, ""), ())
    assert asked.gpus_to_make("gain16") == 1
    assert asked.gpus_to_make("fetched") == 0
    assert pipeline({}, device="cpu").gpus_to_make("gain16") == 0


def test_spread_over_nodes_it_asks_for_as_many_gpus_on_each_and_is_started_once_on_each() -> None:
    spread = pipeline({"ranks": 16, "nodes": 2})
    asked = spread.training_resources()
    assert (asked["nodes"], asked["tasks"], asked["gres"]) == (2, 2, "gpu:8")
    assert "gpu" not in asked
    assert str(asked["mpi"]).startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1")
    assert spread.training_command == "{resources.mpi} halfmatch train"
    assert "gres" not in pipeline({"ranks": 2, "nodes": 2}, device="cpu").training_resources()
