"""Which workflow profiles are let through."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmatch.errors import UserError
from halfmatch.profiles import check


@pytest.fixture
def workflow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "repository/profiles/slurm").mkdir(parents=True)
    (tmp_path / "repository/profiles/default").mkdir()
    (tmp_path / "elsewhere/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "repository"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-n", "--", "all"],
        ["--workflow-profile", "none"],
        ["--workflow-profile", "slurm", "--jobs", "3"],
        ["--jobs", "3", "--workflow-profile=mine"],
        ["--workflow-profile", "../repository/profiles/slurm"],
    ],
)
def test_profiles_that_snakemake_finds_are_let_through(workflow_folder: Path, arguments: list[str]) -> None:
    check(arguments, workflow_folder)


@pytest.mark.parametrize(
    "arguments", [["--workflow-profile", "slrum"], ["-n", "--workflow-profile=profiles/slurm", "--", "all"]]
)
def test_a_profile_that_does_not_exist_is_refused_and_those_that_do_are_named(
    workflow_folder: Path, arguments: list[str]
) -> None:
    with pytest.raises(UserError, match=r"there is no such profile.*one of default, slurm$"):
        check(arguments, workflow_folder)
