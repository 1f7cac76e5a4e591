"""Where models come from. Whatever the source, the result is one kind of folder, which every step loads the same way.

`prepare` writes the folder, `check`s it, and `digest` names its content; `load` and `load_tokenizer` read it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from halfmatch.config import ModelSource
from halfmatch.errors import UserError
from halfmatch.models.folder import check, digest, load, load_config, load_tokenizer, staged

__all__ = ["check", "digest", "load", "load_config", "load_tokenizer", "prepare"]


def prepare(
    source: ModelSource,
    folder: Path,
    *,
    start: Path | None = None,
    seed: int = 0,
    progress: Callable[[int, str], None] | None = None,
    device: str = "cpu",
) -> None:
    """Write a checked model folder; it appears, in place of an older one, when it is complete.

    start: the folder of the model that `source.bootstrap.start` names. seed: of a bootstrapped model's weights and
    demonstrations. progress: told of every optimizer step of a bootstrapped model. device: where that is trained.
    """
    from halfmatch.models import bootstrap, sources

    with staged(Path(folder)) as staging:
        if source.source == "bootstrap" and source.bootstrap is not None:
            bootstrap.write_bootstrapped(
                source.bootstrap, staging, start=start, seed=seed, progress=progress, device=device
            )
        elif source.source == "hub":
            sources.write_from_hub(source, staging)
        elif source.source == "folder":
            sources.write_from_folder(source, staging)
        else:
            sources.write_from_gguf(source, staging)
        try:
            check(staging)
        except UserError as error:  # speak of what the user named
            named = source.path or source.id or source.package or str(folder)
            raise UserError(str(error).replace(str(staging), named)) from None
