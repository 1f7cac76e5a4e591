"""Put a model into a precision: the same function for the trainer, the critic and the rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.errors import UserError
from halfmatch.precision import attention, torch_dtype
from halfmatch.precision.emulation import EmulatedLinear, RoundingLinear, is_emulated
from halfmatch.precision.own_matmuls import has_own_matmuls, replace_own_matmuls

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfmatch.precision import DType, Emulate, Fp32Module


def cast_model(
    model: PreTrainedModel, dtype: DType, fp32_modules: Collection[Fp32Module] = (), emulate: Emulate = "auto"
) -> None:
    """Make `model` compute in `dtype`, in place; its Parameter objects stay the same, so tied weights stay tied.

    - Parameters become `dtype`. Buffers (rotary frequencies) keep theirs.
    - `fp32_modules` keep fp32 parameters and compute in fp32. They give their result back in `dtype`, but for the LM
      head and the value head, which give fp32. A weight that an fp32 LM head shares with the embedding is fp32, and
      the embedding rounds its output: the same bits as an embedding in `dtype`.
    - With `between_matmuls` among them all is fp32 and stays so, parameters too; what a Linear layer or attention
      multiplies is rounded to `dtype` when it is, unless that part is in fp32 itself.
    - Where `is_emulated`, Linear layers become emulated ones, and so do the matmuls of routers and experts.
    - Attention becomes `halfmatch.precision.attention` on a CPU, PyTorch's fused kernels elsewhere.
    """
    prepare_model(model, dtype, fp32_modules, emulate)
    if "between_matmuls" in fp32_modules and dtype != "fp32":
        return
    kept_parameters = _parameters_in_fp32(model, fp32_modules)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in kept_parameters else torch_dtype(dtype))


def prepare_model(
    model: PreTrainedModel,
    dtype: DType,
    fp32_modules: Collection[Fp32Module] = (),
    emulate: Emulate = "auto",
    device: str | None = None,
) -> None:
    """All of `cast_model` but the cast of the parameters: for a model whose parameters are cast where they are used.

    `device`: where the model will compute, if it is not there yet.
    """
    device = device or next(model.parameters()).device.type
    compute = torch_dtype(dtype)
    kept = modules_in_fp32(model, fp32_modules)
    implementation = attention.NAME if device == "cpu" else attention.FUSED_NAME
    if "between_matmuls" in fp32_modules and dtype != "fp32":
        _refuse_other_matmuls(model)
        in_fp32 = "attention" in fp32_modules
        _set_attention(model, implementation if in_fp32 else attention.rounding_name(implementation, dtype))
        _replace_linears(model, lambda layer: RoundingLinear(layer, compute), leave=kept)
        return
    _set_attention(model, implementation)
    emulated = is_emulated(dtype, emulate, device)
    if device == "cpu":
        replace_own_matmuls(model, in_16_bits=dtype != "fp32", emulated=emulated, leave=kept)
    if dtype == "fp32":
        return
    for module, name in kept.items():
        module.register_forward_pre_hook(_widen_inputs, with_kwargs=True)
        if name not in ("lm_head", "value_head"):
            module.register_forward_hook(_CastOutputs(compute))
    if "attention" in fp32_modules:
        for module in model.modules():
            if "rotary" in type(module).__name__.lower():  # its angles come in the dtype of what it is given
                module.register_forward_pre_hook(_widen_inputs, with_kwargs=True)
    embedding = model.get_input_embeddings()
    if id(embedding.weight) in _parameters_in_fp32(model, fp32_modules):
        embedding.register_forward_hook(_CastOutputs(compute))
    if emulated:
        _replace_linears(model, EmulatedLinear, leave=kept)


def _parameters_in_fp32(model: PreTrainedModel, names: Collection[Fp32Module]) -> set[int]:
    return {id(parameter) for module in modules_in_fp32(model, names) for parameter in module.parameters()}


def modules_in_fp32(model: PreTrainedModel, names: Collection[Fp32Module]) -> dict[torch.nn.Module, Fp32Module]:
    """The modules that each name stands for, those inside of another left out.

    A model without a router or a value head has none of them. `between_matmuls` stands for no modules.
    """
    found: dict[torch.nn.Module, Fp32Module] = {}
    head = model.get_output_embeddings()
    if "lm_head" in names and head is not None:
        found[head] = "lm_head"
    inside = "-"  # of the module that was found last
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        name = part_of(path.rpartition(".")[2], module)
        if name is not None and name in names:
            found[module] = name
            inside = f"{path}."
    for name in ("attention", "mlp"):
        if name in names and name not in found.values():
            raise UserError(f"{type(model).__name__} has no module that is known as its {name}; leave it out")
    return found


def part_of(leaf: str, module: torch.nn.Module) -> Fp32Module | None:
    """What a module is, by its own name in the model (`leaf`) and that of its class."""
    kind = type(module).__name__.lower()
    if "norm" in kind:
        return "norm"
    if leaf == "value_head":
        return "value_head"
    if kind.endswith("router") or leaf in ("gate", "router"):
        return "router"
    if leaf in ("self_attn", "attention", "attn"):
        return "attention"
    return "mlp" if leaf in ("mlp", "feed_forward", "block_sparse_moe") else None


def round_as_a_pass(model: PreTrainedModel) -> None:
    """Let attention of one query in a cast model round as that of many does: what is decoded from a cache then comes
    close to what a full-sequence pass gives. Elsewhere than on a CPU kernels are what they are."""
    implementation = str(model.config._attn_implementation)
    if not implementation.startswith(attention.FUSED_NAME):
        _set_attention(model, implementation.replace(attention.NAME, attention.PASS_NAME, 1))


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise UserError(
            f"{type(model).__name__} computes attention in its own way, which cannot be exchanged for "
            f"{implementation!r}; models that are built on transformers' AttentionInterface work (Llama, Qwen2, Qwen3 "
            "and most others)"
        )


def _refuse_other_matmuls(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if has_own_matmuls(module):
            raise UserError(
                f"fp32_modules: between_matmuls: {path} multiplies by its weights in a way of its own, so its inputs "
                "would not be rounded; this works for models whose matmuls are Linear layers and attention"
            )


def _replace_linears(
    model: torch.nn.Module,
    replacement: Callable[[torch.nn.Linear], torch.nn.Module],
    leave: Collection[torch.nn.Module],
) -> None:
    kept = {part for module in leave for part in module.modules()}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear and child not in kept:
                setattr(parent, name, replacement(child))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _widen_inputs(
    module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _cast(arguments, torch.float32), {name: _cast(value, torch.float32) for name, value in options.items()}


class _CastOutputs:
    """A forward hook that rounds what a module gives; a class, and no closure, so that the model can be copied."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, self.dtype)
