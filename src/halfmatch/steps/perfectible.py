"""Count the verdicts of all shards and keep the problems that the model solves sometimes."""

from __future__ import annotations

import sys
from pathlib import Path

from halfmatch import artifacts, jobs
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.solvability import solve_rates
from halfmatch.steps import provenance


def run(config: Config) -> None:
    paths, settings = Paths(Path(config.output)), config.solvability
    problems = paths.of("problems", problems=settings.problems)
    shards = {shard: paths.of("shard", shard=shard) for shard in jobs.shards(config)}
    verdicts = (
        (row["problem_id"], row["verdict"])
        for path in shards.values()
        for group in artifacts.row_groups(path, "completions", ["problem_id", "verdict"])
        for row in group.to_pylist()
    )
    rows = list(
        solve_rates(
            artifacts.read(problems, "problems"),
            verdicts,
            low=settings.low,
            high=settings.high,
            confidence=config.report.confidence,
        )
    )
    kept = sum(row["kept"] for row in rows)
    print(f"{kept} of {len(rows)} problems solved between {settings.low:.0%} and {settings.high:.0%}", file=sys.stderr)
    source = provenance(config, "perfectible", inputs={"problems": problems, **shards})
    artifacts.write(paths.of("perfectible"), "perfectible", rows, source)
