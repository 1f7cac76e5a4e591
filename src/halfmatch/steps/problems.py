"""Read one problem set: its problems, and the rows that did not become problems."""

from __future__ import annotations

import sys
from pathlib import Path

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.problems import load_with_excluded, summary
from halfmatch.steps import provenance


def run(config: Config, *, problems: str) -> None:
    paths = Paths(Path(config.output))
    table, excluded = load_with_excluded(config.problems[problems], seed=config.seed, rule=config.grading.rule)
    for row in excluded:
        print(f"{problems}: row {row['row']} left out: {row['reason']}", file=sys.stderr)
    print(f"{problems}: {table.num_rows} problems; rows left out: {summary(excluded)}", file=sys.stderr)
    source = provenance(config, "problems", problems=problems)
    artifacts.write(paths.of("excluded", problems=problems), "excluded", excluded, source)
    artifacts.write(paths.of("problems", problems=problems), "problems", table.to_pylist(), source)
