"""A bootstrapped model that takes a second to make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halfmatch import models
from halfmatch.config import Bootstrap, ModelSource

SMALL = {"layers": 1, "intermediate_size": 32, "steps": 3, "batch_size": 4, "thinking_tokens": (2, 4)}


@pytest.fixture(scope="session")
def bootstrap_source() -> Callable[..., ModelSource]:
    """`bootstrap_source(steps=40)`: the source of that model, with changes."""

    def source(**changes: object) -> ModelSource:
        return ModelSource(source="bootstrap", bootstrap=Bootstrap.model_validate({**SMALL, **changes}))

    return source


@pytest.fixture(scope="session")
def bootstrapped(tmp_path_factory: pytest.TempPathFactory, bootstrap_source: Callable[..., ModelSource]) -> Path:
    """The folder of a model of one layer after three steps; tests do not change it."""
    folder = tmp_path_factory.mktemp("bootstrapped") / "model"
    models.prepare(bootstrap_source(), folder, seed=1)
    return folder
