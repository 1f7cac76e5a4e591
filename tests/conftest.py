"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

from halfmatch.config import Config
from halfmatch.config_files import to_yaml

# A first example pays for imports, and a busy machine is no failure: no test depends on time.
settings.register_profile("halfmatch", deadline=None)
settings.load_profile("halfmatch")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes with one thread, as the steps do: with more, sums have another order in another batch."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Qwen2 (width 64, 2 layers, head_dim 32, 20 tokens, tied embeddings) with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-model")
    letters = ["<pad>", "<eos>", *"0123456789×=abcdef"]
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(letters),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_moe_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Qwen3-MoE (width 64, 2 layers of 8 experts, 2 a token) with the same tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("tiny-moe")
    shutil.copytree(tiny_model_folder, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=20,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder)
    return folder


# What steps, logs and artefacts must never show, as people have it in their environments.
SECRETS = {
    "HF_TOKEN": "hf_secretOfHuggingFace",
    "WANDB_API_KEY": "secret-of-wandb-0123456789",
    "AWS_SECRET_ACCESS_KEY": "secretOfTheCloud/0123456789",
    "OPENAI_API_KEY": "sk-secret-of-an-api",
}
_TINY_RUN = """
output: results/tiny
problems: {all: {source: generator, split: all, highest_factor: 4}}
models:
  small:
    source: bootstrap
    bootstrap: &shape
      {layers: 1, hidden_size: 32, heads: 1, intermediate_size: 32, steps: 5, batch_size: 8, thinking_tokens: [3, 5]}
  sharp: {source: bootstrap, bootstrap: {<<: *shape, start: small, gain: 48}}
precisions: {bf16: {compute: bf16, rollout: bf16, emulate: always}}
engine: {slots: 16}
solvability: {model: sharp, problems: all, precision: bf16, samples: 2, sampling: {max_tokens: 12}, low: 0, high: 1}
mismatch:
  models: [sharp]
  precisions: [bf16]
  samples: 2
  sampling: {max_tokens: 12}
  gradient_fidelity: {enabled: false}
training:
  precisions: [bf16]
  objectives: [grpo]
  seeds: [0]
  iterations: 1
  prompts_per_iteration: 2
  samples_per_prompt: 2
  gradient_steps: 1
  sampling: {max_tokens: 12}
  keep_weights_every: 1
evaluation: {benchmarks: [all], samples: 2, k: [1], sampling: {max_tokens: 12}}
report: {bootstrap_samples: 100}
"""


@dataclass(frozen=True)
class TinyRun:
    """The whole pipeline at its smallest, as its steps left it; tests copy it before they change anything."""

    folder: Path  # the working directory of the run
    messages: str
    secrets: Mapping[str, str]  # of its environment


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Every step once, in the order of the pipeline, with SECRETS in the environment."""
    folder = tmp_path_factory.mktemp("tiny-run")
    values = yaml.safe_load(_TINY_RUN)
    (folder / "results/tiny").mkdir(parents=True)
    (folder / "results/tiny/config.yaml").write_text(to_yaml(Config.model_validate(values)), encoding="utf-8")
    program = (
        "from halfmatch import cli, jobs\n"
        "from halfmatch.config_files import load\n"
        "from pathlib import Path\n"
        "file = 'results/tiny/config.yaml'\n"
        "config = load([Path(file)])\n"
        "for step in cli.STEPS:\n"
        "    for job in jobs.jobs(config, step):\n"
        "        options = [text for name, value in job.items() for text in (f'--{name}', value)]\n"
        "        assert cli.main([step, '--config', file, *options]) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **SECRETS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return TinyRun(folder, done.stdout, SECRETS)
