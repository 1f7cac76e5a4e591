"""Put a model into a precision: the same function for the trainer, the critic and the rollout engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.errors import UserError
from halfmatch.precision import attention, torch_dtype
from halfmatch.precision.emulation import EmulatedLinear, is_emulated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfmatch.precision import DType, Emulate, Fp32Module


def cast_model(
    model: PreTrainedModel, dtype: DType, fp32_modules: Collection[Fp32Module] = (), emulate: Emulate = "auto"
) -> None:
    """Make `model` compute in `dtype`, in place; its Parameter objects stay the same, so tied weights stay tied.

    - Parameters become `dtype`. Buffers (rotary frequencies) keep theirs.
    - `fp32_modules` keep fp32 parameters and compute in fp32. Norms and routers give their result back in `dtype`; the
      LM head and the value head give fp32. A weight that an fp32 LM head shares with the embedding is fp32, and the
      embedding rounds its output: the same bits as an embedding in `dtype`.
    - Where `is_emulated`, Linear layers become emulated ones.
    - Attention becomes `halfmatch.precision.attention` on a CPU, PyTorch's fused kernels elsewhere.
    """
    device = next(model.parameters()).device
    compute = torch_dtype(dtype)
    kept = modules_in_fp32(model, fp32_modules)
    kept_parameters = {id(parameter) for module in kept for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in kept_parameters else compute)
    _set_attention(model, attention.NAME if device.type == "cpu" else "sdpa")
    if dtype == "fp32":
        return
    for module, name in kept.items():
        module.register_forward_pre_hook(_cast_inputs)
        if name in ("norm", "router"):
            module.register_forward_hook(_CastOutputs(compute))
    embedding = model.get_input_embeddings()
    if id(embedding.weight) in kept_parameters:
        embedding.register_forward_hook(_CastOutputs(compute))
    if is_emulated(dtype, emulate, str(device)):
        _emulate_linears(model, leave=kept)


def modules_in_fp32(model: PreTrainedModel, names: Collection[Fp32Module]) -> dict[torch.nn.Module, Fp32Module]:
    """The modules that each name stands for; a model without a router or a value head has none of them."""
    found: dict[torch.nn.Module, Fp32Module] = {}
    head = model.get_output_embeddings()
    if "lm_head" in names and head is not None:
        found[head] = "lm_head"
    for path, module in model.named_modules():
        leaf, kind = path.rpartition(".")[2], type(module).__name__.lower()
        if "norm" in names and "norm" in kind:
            found[module] = "norm"
        elif "value_head" in names and leaf == "value_head":
            found[module] = "value_head"
        elif "router" in names and (kind.endswith("router") or leaf in ("gate", "router")):
            found[module] = "router"
    return found


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise UserError(
            f"{type(model).__name__} computes attention in its own way, which cannot be exchanged for "
            f"{implementation!r}; models that are built on transformers' AttentionInterface work (Llama, Qwen2, Qwen3 "
            "and most others)"
        )


def _emulate_linears(model: torch.nn.Module, leave: Collection[torch.nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear and child not in leave:
                setattr(parent, name, EmulatedLinear(child))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _cast_inputs(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return _cast(arguments, torch.float32)


class _CastOutputs:
    """A forward hook that rounds what a module gives; a class, and no closure, so that the model can be copied."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, self.dtype)
