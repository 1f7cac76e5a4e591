import json
import random

import numpy as np
import pytest
import torch

from halfmatch.errors import UserError
from halfmatch.rl import checkpoints
from halfmatch.rl.checkpoints import Checkpoints

COURSE = {"settings": "aaaa", "code": "cccc"}
WEIGHTS = {"w": torch.tensor([[1.5, float("nan")]]), "b": torch.tensor(2.0)}


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "run", course=COURSE, keep=2)


def save(store, iterations, *, state=None, tensors=WEIGHTS, finished=False):
    store.save(iterations, state or {"step": iterations}, tensors, finished=finished)
    store.wait()


def names(store):
    return [path.name for path in sorted(store.folder.iterdir())]


def test_a_state_comes_back_as_it_was(store):
    save(store, 3, state={"step": 7, "rows": [{"loss": 0.1, "event": None, "norm": float("nan")}]})
    found = store.find(100)
    assert found.iterations == 3
    assert found.state["step"] == 7
    assert repr(found.state["rows"]) == "[{'loss': 0.1, 'event': None, 'norm': nan}]"
    filled = {name: torch.zeros_like(weight) for name, weight in WEIGHTS.items()}
    found.read_tensors(filled)
    for name, weight in WEIGHTS.items():
        torch.testing.assert_close(filled[name], weight, rtol=0, atol=0, equal_nan=True)


def test_what_is_written_is_what_the_tensors_were_when_it_was_asked_for(store):
    weights = {"w": torch.arange(1000.0)}
    store.save(1, {}, weights)
    weights["w"].zero_()
    store.wait()
    store.find(1).read_tensors(weights)
    assert torch.equal(weights["w"], torch.arange(1000.0))


def test_a_finished_run_is_on_disk_when_save_returns(store):
    store.save(3, {}, WEIGHTS, finished=True)
    assert names(store) == ["iteration-00000003"]


def test_nothing_to_load(store):
    assert store.find(100) is None
    assert store.latest() is None


def test_random_numbers_go_on_where_they_were(store):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.normal()  # both generators hold a spare value now
    save(store, 1)
    draws = [(random.gauss(0, 1), np.random.normal(), torch.rand(1).item()) for _ in range(3)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    store.find(1)
    assert [(random.gauss(0, 1), np.random.normal(), torch.rand(1).item()) for _ in range(3)] == draws


def test_the_last_ones_stay(store):
    for iterations in (10, 20, 30):
        save(store, iterations)
    assert names(store) == ["iteration-00000020", "iteration-00000030"]
    assert store.find(100).iterations == 30
    assert store.find(29).iterations == 20  # a shorter run does not take the state of a longer one
    assert store.find(10) is None


def test_a_write_that_fails_is_told_and_leaves_the_checkpoint_before(store, monkeypatch):
    save(store, 10)

    def fail(path):
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoints, "sync", fail)
    store.save(20, {}, WEIGHTS)
    with pytest.raises(OSError, match="the disk is full"):
        store.wait()
    assert store.find(100).iterations == 10


def test_leftovers_of_a_killed_write_are_not_checkpoints(store):
    save(store, 10)
    (store.folder / ".iteration-00000020.part").mkdir()
    (store.folder / ".iteration-00000020.part/state.json").write_text("{")
    assert store.latest().name == "iteration-00000010"
    assert store.find(100).iterations == 10
    assert names(store) == ["iteration-00000010"]


def test_a_shorter_run_keeps_its_own_checkpoints_beside_those_of_the_longer(store):
    for iterations in (20, 30, 10, 15):
        save(store, iterations)
    assert store.find(25).state == {"step": 20}
    assert store.find(15).state == {"step": 15}


def test_an_unfinished_run_with_other_settings_is_refused(store):
    save(store, 10)
    other = Checkpoints(store.folder, course={**COURSE, "settings": "bbbb"}, keep=2)
    with pytest.raises(UserError, match=r"iteration-00000010: .*with other settings\. .*remove"):
        other.find(100)
    assert store.find(100).iterations == 10


def test_a_finished_run_with_other_settings_is_replaced(store):
    save(store, 10)
    save(store, 20, finished=True)
    other = Checkpoints(store.folder, course={**COURSE, "settings": "bbbb"}, keep=2)
    assert other.find(100) is None
    save(other, 10)
    assert other.find(100).iterations == 10
    assert len(names(store)) == 1


def test_there_is_nothing_in_a_checkpoint_that_could_run_code(store):
    save(store, 10)
    kinds = {file.suffix for file in store.latest().iterdir()}
    assert kinds == {".json", ".safetensors"}


@pytest.mark.parametrize("tensors", [{"w": WEIGHTS["w"]}, {**WEIGHTS, "more": torch.zeros(2)}])
def test_the_tensors_of_another_model_are_refused(store, tensors):
    save(store, 10)
    with pytest.raises(UserError, match=r"iteration-00000010: does not hold the tensors of this run: (b|more); remove"):
        store.find(100).read_tensors(tensors)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("file", ["state.json", "random-0.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_a_checkpoint_that_is_cut_short_is_named(store, share, file):
    save(store, 10, tensors={"w": torch.arange(1000.0)})
    path = store.latest() / file
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError, match=r"iteration-00000010.*remove .*to go on from the one before it"):
        store.find(100).read_tensors({"w": torch.zeros(1000)})


def test_a_folder_of_something_else_is_named(store):
    save(store, 10)
    (store.latest() / "state.json").write_text(json.dumps(["something else"]))
    with pytest.raises(UserError, match="iteration-00000010: is no checkpoint of halfmatch"):
        store.find(100)


def test_one_process_at_a_time_uses_a_run_s_checkpoints(store):
    other = Checkpoints(store.folder, course=COURSE, keep=2)
    with store.sole_user(), pytest.raises(UserError, match="another process"), other.sole_user():
        pass
    with other.sole_user():
        pass
