"""An LM head in fp32 for vLLM: fp32 weights, fp32 logits, as the trainer computes them with fp32_modules: [lm_head].

vLLM's own option (head_dtype) widens weights that were rounded to the rollout dtype first; the trainer's head is never
rounded, so that would be a mismatch by design.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from halfmatch.errors import UserError


def weight_name(checkpoint_names: Collection[str]) -> str:
    """Which weight of a checkpoint the head multiplies by: its own, or the embedding's where the two are tied."""
    for ending in ("lm_head.weight", "embed_tokens.weight"):
        for name in checkpoint_names:
            if name.endswith(ending):
                return name
    raise UserError("fp32_modules: lm_head: the model has neither lm_head.weight nor embed_tokens.weight")


def read_weight(folder: Path, name: str) -> torch.Tensor:
    """One weight of a model folder."""
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            if name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                return weights.get_tensor(name)
    raise ValueError(f"{folder} has no weight {name}")


def install(model: Any, weight: torch.Tensor) -> None:
    """Make a vLLM model compute logits [N, V] = hidden [N, d] · weight [V, d]ᵀ in fp32; runs where the model lives."""
    processor = model.logits_processor
    if processor.scale != 1.0 or processor.soft_cap is not None or getattr(model.lm_head, "bias", None) is not None:
        raise UserError(
            "fp32_modules: lm_head: the model scales, caps or shifts its logits, which the fp32 head of the vllm "
            "engine does not; remove lm_head from fp32_modules, or sample with engine.name: transformers"
        )
    device = next(model.parameters()).device
    wide = weight.detach().to(device=device, dtype=torch.float32, copy=True)

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden_states.float(), wide)

    model.compute_logits = compute_logits
