"""A workflow profile that does not exist is refused: Snakemake goes on without it, and runs a cluster's jobs here."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from halfmatch.errors import UserError

FOLDER = Path("profiles")


def check(arguments: Sequence[str], workflow_folder: Path) -> None:
    """UserError where Snakemake's arguments name a workflow profile that lies at none of the places it looks at.

    `workflow_folder` is where the Snakefile lies; the name "none" stands for no profile.
    """
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--workflow-profile", default="none")
    name = parser.parse_known_args([*arguments])[0].workflow_profile
    places = [Path(name), FOLDER / name, workflow_folder / FOLDER / name]
    if name == "none" or any(place.exists() for place in places):
        return
    here = sorted(folder.name for folder in (workflow_folder / FOLDER).iterdir() if folder.is_dir())
    raise UserError(
        f"--workflow-profile {name}: there is no such profile, and without it all jobs would run on this machine; "
        f"give the path of one, or one of {', '.join(here)}"
    )
