"""How weights get to vLLM: under the names of a checkpoint, or as an adapter that it loads beside its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from halfmatch.config import Lora

# What vLLM reserves room for; an adapter takes the next one above its rank.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_ADAPTER_NAME, _ADAPTER_NUMBER = "policy", 1


def checkpoint_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by their names in a checkpoint: transformers holds all experts of a layer in one tensor, gate and up
    projection [experts, 2 m, h] and down projection [experts, h, m]; a checkpoint has three matrices an expert."""
    for name, weight in weights:
        layer, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in weight):
                yield f"{layer}.experts.{expert}.gate_proj.weight", gate
                yield f"{layer}.experts.{expert}.up_proj.weight", up
        elif kind == "down_proj":
            for expert, down in enumerate(weight):
                yield f"{layer}.experts.{expert}.down_proj.weight", down
        else:
            yield name, weight


def checkpoint_names(model: Path) -> frozenset[str]:
    """Names of the weights in a model folder."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            names.update(weights.keys())
    return frozenset(names)


def repack(model: torch.nn.Module) -> None:
    """Run in a worker after a reload: vLLM's CPU kernels multiply by packed copies of weights.

    A reload packs anew the layers that were given weights. A head that is tied to the embedding is given none, and
    would go on multiplying by the old copy. Experts are packed at the first load alone, and would be read as packed.
    """
    head = getattr(model, "lm_head", None)
    if method := getattr(head, "quant_method", None):
        method.process_weights_after_loading(head)
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and next(layer.parameters()).device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(layer)


def reload_from_disk(llm: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """The workers of tensor parallelism are processes of their own: they read a file, each its shards."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="halfmatch-weights-") as folder:
        save_file({name: w.contiguous().cpu() for name, w in weights.items()}, Path(folder) / "model.safetensors")
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def adapter_settings(adapter: Lora | None) -> dict[str, Any]:
    """What vLLM is started with."""
    if adapter is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= adapter.rank),
    }


def load_adapter(llm: Any, weights: Mapping[str, torch.Tensor], adapter: Lora) -> Any:
    """Put an adapter, new or in the place of the one before, on an engine; what its requests must carry."""
    from vllm.lora.request import LoRARequest

    from halfmatch.models.lora import save_adapter

    with tempfile.TemporaryDirectory(prefix="halfmatch-adapter-") as folder:
        save_adapter(weights, adapter, Path(folder), base=None)
        request = LoRARequest(_ADAPTER_NAME, _ADAPTER_NUMBER, folder, load_inplace=True)
        llm.llm_engine.add_lora(request)
        # Requests name it as it is loaded; from disk it comes this once.
        return LoRARequest(_ADAPTER_NAME, _ADAPTER_NUMBER, folder)
