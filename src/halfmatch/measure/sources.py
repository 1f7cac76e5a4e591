"""What a user may name on the command line: a model, a problem set."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from halfmatch import models
from halfmatch.config import ModelSource, ProblemSource
from halfmatch.errors import UserError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+")
_PACKAGE = "package:"


def name_of(model: str) -> str:
    """A short name for a model or a file, fit for paths."""
    last = model.removeprefix(_PACKAGE).partition("@")[0].rstrip("/").rpartition("/")[2]
    stem = re.sub(r"\.(gguf|parquet|jsonl?)$", "", last)
    return re.sub(r"[^A-Za-z0-9.\-]+", "-", stem).strip("-.") or "model"


def model_source(model: str) -> ModelSource:
    """A folder, a GGUF file, package:NAME (an installed Python package that ships one), or a hub id, as in ORG/NAME or
    ORG/NAME@COMMIT."""
    path = Path(model).expanduser()
    if model.startswith(_PACKAGE):
        return ModelSource(source="gguf", package=model.removeprefix(_PACKAGE))
    if path.is_dir():
        return ModelSource(source="folder", path=str(path))
    if path.is_file():
        return ModelSource(source="gguf", path=str(path))
    identifier, _, revision = model.partition("@")
    if _HUB_ID.fullmatch(identifier):
        return ModelSource(source="hub", id=identifier, revision=_commit(identifier, revision or "main", "model"))
    if _is_installed(model):
        raise UserError(f"{model}: to use the GGUF file that this Python package ships, write {_PACKAGE}{model}")
    raise UserError(
        f"{model}: there is no such folder or GGUF file, and it is neither a hub id (ORG/NAME) nor {_PACKAGE}NAME"
    )


def place(model: str, folder: Path) -> None:
    """Put a model into `folder`: a local one by a link, since it may be large, others by fetching or converting."""
    source = model_source(model)
    if source.source != "folder":
        models.prepare(source, folder)
        return
    target = Path(str(source.path)).resolve()
    models.check(target)
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        raise UserError(f"{folder}: holds another model already; choose another --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(target, target_is_directory=True)


def problems(name: str) -> list[str]:
    """The texts of a problem set: generator, a file (Parquet, JSONL, Arrow, CSV), or a hub dataset as ORG/NAME[@COMMIT]
    [:SPLIT]; they have columns problem and answer."""
    from halfmatch import problems as problem_sets

    if name == "generator":
        spec = ProblemSource(source="generator", split="all")
    elif Path(name).expanduser().is_file():
        spec = ProblemSource(source="file", path=name)
    else:
        rest, _, split = name.partition(":")
        identifier, _, revision = rest.partition("@")
        if not _HUB_ID.fullmatch(identifier):
            raise UserError(f"--problems {name}: no such file, and neither generator nor a hub id (ORG/NAME)")
        commit = _commit(identifier, revision or "main", "dataset")
        spec = ProblemSource(source="hub", id=identifier, revision=commit, split=split or "test")
    return problem_sets.load(spec)["problem"].to_pylist()


def _commit(identifier: str, revision: str, kind: str) -> str:
    """The commit that a name of a revision stands for now."""
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        commit = HfApi().repo_info(identifier, revision=revision, repo_type=kind).sha
    except Exception as error:  # no network, no such repository, gated: the hub's errors have no common class
        raise UserError(
            f"{identifier}: the hub could not tell the commit of {revision!r} ({str(error).splitlines()[0]}); write "
            f"{identifier}@COMMIT for a {kind} that is in the local cache"
        ) from None
    assert commit is not None
    return commit


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return True
