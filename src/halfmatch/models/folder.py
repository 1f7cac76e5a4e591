"""A model folder: safetensors, config.json, generation_config.json and the tokenizer's files, as transformers has them.

Reading the digest does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmatch.errors import UserError
from halfmatch.staging import staging_path

# The files that a tokenizer's vocabulary comes in, of one kind or another.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.tiktoken")

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to write to that takes its name, and an older one's place, when the block ends without an error."""
    staging = staging_path(folder)
    shutil.rmtree(staging, ignore_errors=True)  # of a killed process that had this one's id, as containers repeat them
    staging.mkdir(parents=True)
    try:
        yield staging
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model, its generation configuration and its tokenizer."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk, say, is only in its text
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from None
    tokenizer.save_pretrained(folder)
    for weights in weight_files(folder):  # safetensors makes its files readable by their owner alone
        shutil.copymode(folder / "config.json", weights)


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a model folder's files, hidden ones (other tools leave some) apart."""
    files = sorted(path for path in require(folder).iterdir() if path.is_file() and not path.name.startswith("."))
    total = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for path, content in zip(files, pool.map(_file_digest, files), strict=True):
            total.update(f"{path.name}\0{content}\n".encode())
    return total.hexdigest()


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require(folder: Path) -> Path:
    """The folder, if it is one of a model with weights that can be read; UserError otherwise."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such model folder; the step `model` writes it")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: has no config.json, so it is not a model folder of transformers")
    if not weight_files(folder):
        raise UserError(
            f"{folder}: has no weights in safetensors (model.safetensors or model.safetensors.index.json); "
            "save the model with save_pretrained of transformers 4.36 or later"
        )
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load, sorted; with an index, all that it names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: is no index of weights; copy it again from where the model was published") from None
    return [folder / name for name in sorted(names)]


def check(folder: Path) -> None:
    """Refuse what would fail later: foreign code, weights that are not finite, a tokenizer that does not fit."""
    from safetensors import SafetensorError, safe_open

    load_config(folder)
    load_tokenizer(folder)
    _check_generation_config(folder / "generation_config.json")
    for path in weight_files(require(folder)):
        if not path.is_file():
            raise UserError(f"{folder}: its index names {path.name}, which is not there")
        try:
            with safe_open(path, framework="pt") as tensors:
                _refuse_non_finite(folder, ((name, tensors.get_tensor(name)) for name in tensors.keys()))  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(
                f"{folder}: {path.name} is no whole file of safetensors ({_first_line(error)}); copy or fetch it again"
            ) from None


def _check_generation_config(path: Path) -> None:
    """The stop tokens are read from it."""
    try:
        readable = not path.is_file() or isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except ValueError:
        readable = False
    if not readable:
        raise UserError(f"{path}: is no JSON object; copy it again from where the model was published, or remove it")


def load_config(folder: Path) -> Any:
    """The configuration of a model that transformers itself knows: code in the folder is never run."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(require(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: transformers cannot read config.json without running code from the folder "
            f"(trust_remote_code), which is never done here; use a model of an architecture that transformers has "
            f"itself ({_first_line(error)})"
        ) from None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder: tokenizer.json as it stands where there is one.

    AutoTokenizer rebuilds the tokenizer of some architectures from its vocabulary and merges alone, which loses what a
    model's own tokenizer.json says of splitting and of special tokens.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Asked for first: AutoTokenizer makes up an empty vocabulary where there is none.
    if not any((require(folder) / name).is_file() for name in _VOCABULARIES):
        raise UserError(
            f"{folder}: has no tokenizer; copy the files that the model was published with (tokenizer.json, "
            "tokenizer_config.json) into it"
        )
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{folder}: its tokenizer cannot be read ({_first_line(error)})") from None
    embedded = load_config(folder).get_text_config().vocab_size
    if len(tokenizer) > embedded:
        raise UserError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens and the embedding {embedded} rows; this tokenizer "
            "belongs to another model, or the embedding was not resized after tokens were added"
        )
    return tokenizer


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model in evaluation mode with its weights rounded to `dtype`, none of which requires a gradient."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    load_config(folder)
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: the weights cannot be loaded ({_first_line(error)})") from None
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise UserError(
            f"{folder}: {len(names)} weights of the model are in none of its files, the first {names[0]}; "
            "they would be random numbers"
        )
    _refuse_non_finite(folder, model.named_parameters())
    return model.eval().requires_grad_(False)


def _refuse_non_finite(folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, weight in weights:
        if weight.is_floating_point() and not weight.isfinite().all():
            kind = "NaN" if weight.isnan().any() else "infinite numbers"
            raise UserError(
                f"{folder}: weight {name} has {kind} in {str(weight.dtype).removeprefix('torch.')}; the checkpoint is "
                "broken, or its weights are beyond the range of this dtype"
            )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
