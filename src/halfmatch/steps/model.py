"""Fetch or make one model."""

from __future__ import annotations

from pathlib import Path

from halfmatch import models
from halfmatch.config import Config
from halfmatch.paths import Paths
from halfmatch.progress import Progress


def run(config: Config, *, model: str) -> None:
    """Write the folder of one model of the configuration; a bootstrapped one may continue from another's folder."""
    paths = Paths(Path(config.output))
    source = config.models[model]
    start = source.bootstrap.start if source.bootstrap else None
    with Progress(f"model {model}", source.bootstrap.steps if source.bootstrap else 0) as progress:
        models.prepare(
            source,
            paths.of("model", model=model),
            start=paths.of("model", model=start) if start else None,
            seed=config.seed,
            device=config.engine.device,
            progress=progress,
        )
