import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.errors import UserError
from halfmatch.paths import iteration_name, iterations_of
from halfmatch.rl.checkpoints import Checkpoints
from halfmatch.rl.kept_weights import KeptWeights

COURSE = {"settings": "aaaa"}


def write(weights, folder):
    for name, weight in weights.items():
        (folder / name).write_text(str(weight.tolist()))


@pytest.fixture
def kept(tmp_path):
    return KeptWeights(tmp_path / "run/weights", 2, write)


def add(kept, *iterations):
    for done in iterations:
        kept.add(done, {"w": torch.tensor([float(done)])})


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@given(every=st.integers(1, 40), iterations=st.integers(0, 200))
def test_what_is_due_is_what_has_to_be_there(every, iterations):
    kept = KeptWeights(Path("nowhere"), every, write)
    due = [done for done in range(1, iterations + 1) if kept.is_due(done)]
    assert due == [done for done in range(1, iterations + 1) if done % every == 0]
    assert kept.are_whole(iterations) == (not due)


def test_nothing_is_due_where_nothing_is_asked_for():
    kept = KeptWeights(Path("nowhere"), None, write)
    assert not any(kept.is_due(done) for done in range(100))
    assert kept.are_whole(100)


def test_what_is_linked_is_what_was_kept_up_to_then(kept, tmp_path):
    add(kept, 2, 4, 6)
    (tmp_path / "results/iteration-00000008").mkdir(parents=True)  # of a longer run, before
    kept.link(5, tmp_path / "results")
    assert content(tmp_path / "results") == {"iteration-00000002/w": "[2.0]", "iteration-00000004/w": "[4.0]"}
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"iteration-00000002", "iteration-00000004"}
    assert os.path.samefile(tmp_path / "results/iteration-00000002/w", kept.folder / "iteration-00000002/w")
    shutil.rmtree(tmp_path / "results")
    kept.link(6, tmp_path / "results")
    assert len(content(tmp_path / "results")) == 3


def test_where_files_cannot_be_linked_they_are_copied(kept, tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError("no links here")

    add(kept, 2)
    monkeypatch.setattr(os, "link", refuse)
    kept.link(2, tmp_path / "results")
    assert content(tmp_path / "results") == {"iteration-00000002/w": "[2.0]"}
    assert not os.path.samefile(tmp_path / "results/iteration-00000002/w", kept.folder / "iteration-00000002/w")


def test_weights_whose_write_fails_are_not_there(kept):
    def fail(weights, folder):
        (folder / "half").write_text("half")
        raise OSError("the disk is full")

    add(kept, 2)
    with pytest.raises(OSError, match="the disk is full"):
        KeptWeights(kept.folder, 2, fail).add(4, {})
    assert kept.are_whole(3)
    assert not kept.are_whole(4)
    assert list(content(kept.folder)) == ["iteration-00000002/w"]


@given(st.integers(0, 10**6))
def test_names_sort_as_numbers_do_and_can_be_read_again(iterations):
    assert iterations_of(Path("run") / iteration_name(iterations)) == iterations
    assert iteration_name(iterations) < iteration_name(iterations + 1)


# -------------------------------------------------------------------------------------------------- with checkpoints
def checkpoints(kept, **course):
    return Checkpoints(kept.folder.parent, course=COURSE | course, keep=2, kept=kept)


def save(store, iterations, finished=False):
    store.save(iterations, {}, {"w": torch.ones(1)}, finished=finished)
    store.wait()


def test_a_checkpoint_is_gone_on_from_where_the_weights_before_it_are_there(kept):
    add(kept, 2, 4)
    save(checkpoints(kept), 5)
    assert checkpoints(kept).find(9).iterations == 5
    assert kept.are_whole(5)
    sparser = KeptWeights(kept.folder, 4, write)
    assert checkpoints(sparser).find(9).iterations == 5


def test_an_unfinished_run_without_them_is_refused_and_a_finished_one_is_replaced(kept):
    store = checkpoints(kept)
    add(kept, 2)
    save(store, 5)
    with pytest.raises(UserError, match=r"iteration-00000005: .*unfinished run with other weights kept .*remove"):
        checkpoints(kept).find(9)
    assert kept.are_whole(3)
    save(store, 6, finished=True)
    assert checkpoints(kept).find(9) is None
    assert not kept.folder.exists()


def test_a_run_that_starts_afresh_removes_the_weights_of_the_one_before(kept):
    """Of another course, killed before its first checkpoint: they would be taken for this one's."""
    add(kept, 2)
    assert checkpoints(kept, settings="bbbb").find(9) is None
    assert not kept.folder.exists()


def test_what_a_killed_write_has_left_goes(kept):
    add(kept, 2)
    (kept.folder / ".iteration-00000004.123.part").mkdir()
    save(checkpoints(kept), 3)
    checkpoints(kept).find(9)
    assert [path.name for path in kept.folder.iterdir()] == ["iteration-00000002"]
