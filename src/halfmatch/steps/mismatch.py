"""Measure the mismatch of one table of scores: metrics as JSON, curves as CSV."""

from __future__ import annotations

from pathlib import Path

from halfmatch import artifacts
from halfmatch.config import Config
from halfmatch.mismatch import offline
from halfmatch.paths import Paths
from halfmatch.steps import provenance


def run(config: Config, *, model: str, problems: str, engine: str, rollout: str, train: str) -> None:
    paths = Paths(Path(config.output))
    names = {"model": model, "problems": problems, "engine": engine, "rollout": rollout, "train": train}
    scores = paths.of("scores", **names)
    analysis = offline.analyse(
        scores,
        bootstrap_samples=config.report.bootstrap_samples,
        seed=config.seed,
        confidence=config.report.confidence,
    )
    source = provenance(config, "mismatch", inputs={"scores": scores}, **names)
    offline.write_curves(paths.of("mismatch_curves", **names), offline.curves(analysis))
    artifacts.write_json(paths.of("mismatch", **names), analysis, source)
