"""Matmuls of modules that are no Linear layers and multiply by weights of their own: routers and experts.

On a CPU they are made what Linear layers are: emulated in 16 bits, and for every row the same bits whatever the number
of rows. How many tokens an expert gets depends on the batch, and a row of an fp32 matmul has the same bits for any
number of rows from 8 on, so fewer are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from halfmatch.precision.emulation import ROWS
from halfmatch.precision.emulation import linear as emulated_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OwnMatmuls:
    """Of a module whose `functional.linear` runs as described above; its class is this one and the one it had."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def has_own_matmuls(module: torch.nn.Module) -> bool:
    """Whether a module holds matrices and is none of the layers that are known."""
    known = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    return not known and any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def replace_own_matmuls(
    model: PreTrainedModel, *, in_16_bits: bool, emulated: bool, leave: Collection[torch.nn.Module]
) -> None:
    """Give such modules of a model on a CPU their matmuls, in place. Those within `leave` are in fp32, and stay so.

    Without emulation matmuls in 16 bits run as PyTorch has them.
    """
    modules = [module for module in model.modules() if has_own_matmuls(module)]
    if not modules:
        return
    one_expert_after_the_other(model)
    in_fp32 = {part for module in leave for part in module.modules()}
    for module in modules:
        if emulated or not in_16_bits or module in in_fp32:
            kind = type(module)
            module.__class__ = type(kind.__name__, (OwnMatmuls, kind), {})


def one_expert_after_the_other(model: PreTrainedModel) -> None:
    """Compute experts by `functional.linear`, in any dtype, and not all of them in one grouped kernel."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is plain_linear:
            return _padded(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _padded(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`functional.linear` of at least ROWS rows: input [..., in], weight [out, in]."""
    multiply: Callable[..., torch.Tensor] = emulated_linear if input.itemsize == 2 else plain_linear
    rows = input.flatten(0, -2)
    missing = max(ROWS - len(rows), 0)
    result = multiply(pad(rows, (0, 0, 0, missing)), weight, bias)[: len(rows)]
    return result.view(*input.shape[:-1], -1)
