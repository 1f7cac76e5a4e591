"""What both tools would run for each of many configurations; a script, run in a checkout whose results are there.

Reads a JSON list of whole configurations, prints a JSON list of what Snakemake's summary and DVC's status say of each.
Each is asked in a process of its own, forked when what takes seconds, the imports, has been done.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import dvc.repo
import snakemake.cli

from halfmatch.config_files import to_yaml, validate
from halfmatch.stages import to_dvc_yaml


def forked(*works: Callable[[], None]) -> list[str]:
    """What functions print, side by side, each in a process of its own."""
    with ExitStack() as stack:
        printed = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in works]
        children = [start(work, file) for work, file in zip(works, printed, strict=True)]
        for child in children:
            os.waitpid(child, 0)
        for file in printed:
            file.seek(0)
        return [file.read() for file in printed]


def start(work: Callable[[], None], printed: IO[str]) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(printed.fileno(), 1)
    try:
        work()
    finally:
        sys.stdout.flush()
        os._exit(0)


def summary() -> None:
    """A line for each file that the configuration asks for, with its inputs and whether it would be made again."""
    snakemake.cli.main(["--detailed-summary", "--quiet", "all", "--", "all"])


def status() -> None:
    """The files of each stage, and the stages that have changed."""
    repository = dvc.repo.Repo()
    files = {stage.addressing: [out.def_path for out in stage.outs] for stage in repository.index.stages}
    print(json.dumps({"files": files, "changed": list(repository.status())}))


def main() -> None:
    found: list[dict[str, Any]] = []
    for values in json.load(sys.stdin):
        config = validate(values, "")
        Path("config/config.yaml").write_text(to_yaml(config), encoding="utf-8")
        Path("dvc.yaml").write_text(to_dvc_yaml(config), encoding="utf-8")
        table, stages = forked(summary, status)
        found.append({"snakemake": table, "dvc": json.loads(stages)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
