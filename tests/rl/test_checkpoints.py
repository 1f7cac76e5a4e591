import random

import numpy as np
import pytest
import torch

from halfmatch.errors import UserError
from halfmatch.rl import checkpoints
from halfmatch.rl.checkpoints import Checkpoints

COURSE = {"settings": "aaaa", "code": "cccc"}


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "run", course=COURSE, keep=2)


def test_a_state_comes_back_as_it_was(store):
    state = {"weights": {"w": torch.tensor([1.5, float("nan")])}, "step": 7, "rows": [{"loss": 0.1, "event": None}]}
    store.save(3, state)
    done, loaded = store.load(100)
    assert done == 3
    assert loaded["step"] == 7
    assert loaded["rows"] == [{"loss": 0.1, "event": None}]
    torch.testing.assert_close(loaded["weights"]["w"], state["weights"]["w"], rtol=0, atol=0, equal_nan=True)


def test_nothing_to_load(store):
    assert store.load(100) is None
    assert store.latest() is None


def test_random_numbers_go_on_where_they_were(store):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.normal()  # both generators hold a spare value now
    store.save(1, {})
    draws = [(random.gauss(0, 1), np.random.normal(), torch.rand(1).item()) for _ in range(3)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    store.load(1)
    assert [(random.gauss(0, 1), np.random.normal(), torch.rand(1).item()) for _ in range(3)] == draws


def test_the_last_ones_stay(store):
    for iterations in (10, 20, 30):
        store.save(iterations, {"step": iterations})
    assert [path.name for path in sorted(store.folder.iterdir())] == ["iteration-00000020.pt", "iteration-00000030.pt"]
    assert store.load(100)[0] == 30
    assert store.load(29)[0] == 20  # a shorter run does not take the state of a longer one
    assert store.load(10) is None


def test_a_write_that_is_cut_short_leaves_the_checkpoint_before(store, monkeypatch):
    store.save(10, {"step": 10})

    def die(content, file):
        file.write(b"half of a checkpoint")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.torch, "save", die)
    with pytest.raises(KeyboardInterrupt):
        store.save(20, {"step": 20})
    assert store.load(100)[0] == 10


def test_leftovers_of_a_killed_write_are_not_checkpoints(store):
    store.save(10, {"step": 10})
    (store.folder / ".iteration-00000020.pt.123.part").write_bytes(b"half")
    assert store.latest().name == "iteration-00000010.pt"
    assert store.load(100)[0] == 10
    assert [path.name for path in store.folder.iterdir()] == ["iteration-00000010.pt"]


def test_a_shorter_run_keeps_its_own_checkpoints_beside_those_of_the_longer(store):
    for iterations in (20, 30, 10, 15):
        store.save(iterations, {"step": iterations})
    assert store.load(25)[1] == {"step": 20}
    assert store.load(15)[1] == {"step": 15}


def test_an_unfinished_run_with_other_settings_is_refused(store):
    store.save(10, {"step": 10})
    other = Checkpoints(store.folder, course={**COURSE, "settings": "bbbb"}, keep=2)
    with pytest.raises(UserError, match=r"iteration-00000010\.pt.*with other settings\. .*remove"):
        other.load(100)
    assert store.load(100)[0] == 10


def test_a_finished_run_with_other_settings_is_replaced(store):
    store.save(10, {"step": 10})
    store.save(20, {"step": 20}, finished=True)
    other = Checkpoints(store.folder, course={**COURSE, "settings": "bbbb"}, keep=2)
    assert other.load(100) is None
    other.save(10, {"step": 10})
    assert other.load(100)[0] == 10
    assert len(list(store.folder.iterdir())) == 1


def test_a_file_that_would_run_code_is_not_loaded(store):
    class Harmful:
        def __reduce__(self):
            return (print, ("ran",))

    store.folder.mkdir()
    torch.save({"course": COURSE, "finished": False, "state": Harmful()}, store.folder / "iteration-00000001.pt")
    with pytest.raises(UserError, match="which is never loaded"):
        store.load(100)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_checkpoint_that_is_cut_short_is_named(store, share):
    store.save(10, {"step": torch.arange(1000)})
    path = store.latest()
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError, match=f"{path.name}: is no .*checkpoint.*remove it to go on"):
        store.load(100)


def test_one_process_at_a_time_uses_a_run_s_checkpoints(store):
    other = Checkpoints(store.folder, course=COURSE, keep=2)
    with store.sole_user(), pytest.raises(UserError, match="another process"), other.sole_user():
        pass
    with other.sole_user():
        pass
