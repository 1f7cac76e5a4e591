"""LoRA (arXiv 2106.09685) with peft's layers: W x + (alpha / rank) B A x, of which A and B are trained.

The trainer computes the adapter beside a frozen W, both in the compute dtype, and keeps fp32 masters of A and B. An
engine that is given one matrix instead gets W + (alpha / rank) B A, multiplied and added in fp32 from the masters and
rounded once. In 16 bits that rounding is of the size of the update itself while the update is small: `merge_rounding`
measures what it does to the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor

from halfmatch.errors import UserError
from halfmatch.mismatch.metrics import token_metrics
from halfmatch.precision import Precision, torch_dtype
from halfmatch.precision.casting import modules_in_fp32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfmatch.config import Lora

_ADAPTER = "default"  # what peft calls the adapter in the names of its weights
_PEFT_PREFIX = "base_model.model."  # and the wrapper around the model, in the files that it writes


def adapter_config(settings: Lora) -> LoraConfig:
    """The settings as peft has them. Not rank-stabilised, no dropout: as in training, so in sampling."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
    )


def add_adapter(model: PreTrainedModel, settings: Lora, seed: int) -> None:
    """Put an adapter on the targets of a model, in place; A is drawn with `seed`, B is 0, and both alone are trained.

    To be done before the model is cast, so that its Linear layers and the adapter's are emulated alike.
    """
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(adapter_config(settings), model)
        except ValueError as error:
            raise UserError(
                f"training.lora.targets: {', '.join(settings.targets)} cannot be adapted in a {type(model).__name__} "
                f"({str(error).splitlines()[0]})"
            ) from None
    for path, layer in _adapted_layers(model):
        if not isinstance(layer.get_base_layer(), torch.nn.Linear):
            raise UserError(f"training.lora.targets: {path} is no Linear layer; leave it out")


def adapter_weights(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The weights of the adapter by their names in the model; empty where there is none."""
    return {
        f"{path}.lora_{side}.{_ADAPTER}.weight": getattr(layer, f"lora_{side}")[_ADAPTER].weight
        for path, layer in _adapted_layers(model)
        for side in "AB"
    }


def merged_weights(
    model: PreTrainedModel, masters: Mapping[str, torch.Tensor], precision: Precision
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the model without adapter, whole and by its name there: those that are adapted as
    W + (alpha / rank) B A in fp32, of W as the model computes with it and `masters`, the adapter's fp32 weights; the
    others as they are. Of a sharded model every rank asks for them, as they come from all ranks."""
    adapted = {f"{path}.base_layer.weight": (path, layer) for path, layer in _adapted_layers(model)}
    wide = {part for module in modules_in_fp32(model, precision.fp32_modules) for part in module.modules()}
    compute = torch.float32 if "between_matmuls" in precision.fp32_modules else torch_dtype(precision.compute)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        if name in adapted:
            path, layer = adapted[name]
            weight = _merge(weight if layer in wide else weight.to(compute), path, layer, masters)
        yield name.replace(".base_layer.", "."), weight


def save_adapter(masters: Mapping[str, torch.Tensor], settings: Lora, folder: Path, base: str | None) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` reads; base: hub id of the model, if any."""
    from safetensors.torch import save_file

    weights = {
        f"{_PEFT_PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}": weight.detach().cpu().contiguous()
        for name, weight in masters.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    values = {**adapter_config(settings).to_dict(), "base_model_name_or_path": base, "inference_mode": True}
    text = json.dumps(values, indent=2, sort_keys=True, default=sorted)  # peft has sets in it
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------- merge rounding
@dataclass(frozen=True)
class MergeRounding:
    """What rounding the merged weights changes.

    k3: of the policy with merged weights and the one with the adapter beside them, nats a token, both computed by the
    same full-sequence pass. lost: |round(W + Δ) − (W + Δ)| / |Δ| over all adapted weights, Δ the adapter's update; 0
    before there is one. At 1 the rounding is as large as everything that was learned.
    """

    k3: float
    lost: float


@torch.no_grad()
def merge_rounding(
    model: PreTrainedModel,
    masters: Mapping[str, torch.Tensor],
    score: Callable[[], torch.Tensor],
    mask: torch.Tensor,
) -> MergeRounding:
    """Measured on the sequences that `score` gives the model's log-probs of, [B, R], where `mask` [B, R] is true; of a
    whole model, not a sharded one."""
    apart = score()
    with _merged(model, masters) as lost:
        together = score()
    return MergeRounding(token_metrics(apart, together, mask)["k3"], lost)


@contextmanager
def _merged(model: PreTrainedModel, masters: Mapping[str, torch.Tensor]) -> Iterator[float]:
    """The model with its adapter merged into the weights, in their dtype, inside the block, which gets what is lost."""
    rounding = update = 0.0
    kept: list[tuple[LoraLayer, torch.Tensor]] = []
    try:
        for path, layer in _adapted_layers(model):
            weight = layer.get_base_layer().weight
            before = weight.clone()
            kept.append((layer, before))
            exact = _merge(before, path, layer, masters)
            weight.copy_(exact)
            rounding += (weight.float() - exact).square().sum().item()
            update += (exact - before.float()).square().sum().item()
            layer.set_scale(_ADAPTER, 0.0)
        yield (rounding / update) ** 0.5 if update else 0.0
    finally:
        for layer, before in kept:
            layer.get_base_layer().weight.copy_(before)
            layer.set_scale(_ADAPTER, 1.0)


@torch.no_grad()
def _merge(weight: torch.Tensor, path: str, layer: LoraLayer, masters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """W [out, in] + (alpha / rank) B [out, rank] A [rank, in] in fp32."""
    a, b = (masters[f"{path}.lora_{side}.{_ADAPTER}.weight"].float() for side in "AB")
    return weight.float() + layer.scaling[_ADAPTER] * (b @ a)


def _adapted_layers(model: PreTrainedModel) -> Iterator[tuple[str, LoraLayer]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, LoraLayer))
