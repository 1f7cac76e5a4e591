"""What a model folder is named by, and what of a broken one is refused, in words that help."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfmatch import models
from halfmatch.errors import UserError
from halfmatch.models.folder import staged


@pytest.fixture
def folder(bootstrapped: Path, tmp_path: Path) -> Path:
    """A copy of the small model that a test may break."""
    return Path(shutil.copytree(bootstrapped, tmp_path / "copy"))


def change_weights(folder: Path, **weights: torch.Tensor | None) -> None:
    """Replace or (None) remove tensors by name; dots are written as double underscores."""
    tensors = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        name = name.replace("__", ".")
        assert name in tensors
        if weight is None:
            del tensors[name]
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_load_rounds_to_the_dtype_and_freezes(folder: Path) -> None:
    exact = load_file(folder / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = models.load(folder, dtype)
        assert not model.training
        for name, weight in model.named_parameters():
            assert not weight.requires_grad
            assert torch.equal(weight, exact[name].to(dtype))
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_digest_is_of_names_and_contents(folder: Path, bootstrapped: Path) -> None:
    assert models.digest(folder) == models.digest(bootstrapped)
    (folder / ".snakemake_timestamp").write_text("left by another tool")
    assert models.digest(folder) == models.digest(bootstrapped)
    (folder / "generation_config.json").rename(folder / "generation.json")
    assert models.digest(folder) != models.digest(bootstrapped)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_digest_sees_one_changed_byte_anywhere(folder: Path, bootstrapped: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    assert models.digest(folder) != models.digest(bootstrapped)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"

    def fail_on_the_way() -> None:
        with staged(target) as staging:
            (staging / "half").write_text("")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail_on_the_way()
    assert list(target.parent.iterdir()) == []
    for content in ("first", "second"):
        with staged(target) as staging:
            (staging / content).write_text(content)
            assert not (target / content).exists()
        assert [path.name for path in target.iterdir()] == [content]
    assert list(target.parent.iterdir()) == [target]


def test_no_folder(tmp_path: Path) -> None:
    for read in (models.digest, models.load_config, models.check):
        with pytest.raises(UserError, match="no such model folder"):
            read(tmp_path / "missing")


def test_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(UserError, match=r"no config\.json"):
        models.load(tmp_path, torch.float32)


def test_weights_that_are_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="no weights in safetensors"):
        models.load(folder, torch.float32)


def test_a_shard_that_the_index_names_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00002-of-00002"):
        models.check(folder)


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    change_json(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="without running code"):
        models.load(folder, torch.float32)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer; copy the files"):
        models.check(folder)


def test_a_tokenizer_that_cannot_be_read(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="its tokenizer cannot be read"):
        models.check(folder)


def test_a_tokenizer_larger_than_the_embedding(folder: Path) -> None:
    tokenizer = models.load_tokenizer(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="21 tokens and the embedding 20 rows"):
        models.check(folder)


@pytest.mark.parametrize(("value", "message"), [(math.nan, "NaN"), (math.inf, "infinite numbers")])
def test_weights_that_are_not_finite(folder: Path, value: float, message: str) -> None:
    change_weights(folder, model__norm__weight=torch.full((64,), value))
    for read in (models.check, lambda path: models.load(path, torch.float32)):
        with pytest.raises(UserError, match=rf"model\.norm\.weight has {message} in float32"):
            read(folder)


def test_weights_beyond_the_range_of_fp16(folder: Path) -> None:
    change_weights(folder, model__norm__weight=torch.full((64,), 70_000.0))
    models.check(folder)
    assert models.load(folder, torch.bfloat16).model.norm.weight.isfinite().all()
    with pytest.raises(UserError, match=r"model\.norm\.weight has infinite numbers in float16"):
        models.load(folder, torch.float16)


def test_a_weight_that_is_in_no_file_is_not_made_up(folder: Path) -> None:
    change_weights(folder, model__layers__0__mlp__up_proj__weight=None)
    with pytest.raises(UserError, match=r"1 weights of .* first model\.layers\.0\.mlp\.up_proj"):
        models.load(folder, torch.float32)
