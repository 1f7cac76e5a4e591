"""What a model really computes in, and where its numbers stop being finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfmatch.errors import UserError
from halfmatch.precision import Precision, torch_dtype
from halfmatch.precision.casting import modules_in_fp32
from halfmatch.precision.emulation import EmulatedLinear, RoundingLinear
from halfmatch.precision.own_matmuls import OwnMatmuls

# Operators that multiply matrices, by the part of their names before the overload.
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm", "_scaled_dot_product", "mkldnn_linear")


def audit_matmuls(model: torch.nn.Module, precision: Precision, input_ids: torch.Tensor) -> dict[str, torch.dtype]:
    """Run a dry forward pass on `input_ids` [B, T] and say in which dtype each module multiplies matrices.

    A module with weights must have them, its inputs and its kernel in `precision.compute` (float32 for fp32 modules);
    the kernel of an emulated layer is float32. A module without weights (attention, rotary angles) may widen what it is
    given, as fused kernels do. UserError where something else is found: the setting did not reach the model.
    """
    expected = _expected_dtypes(model, precision)
    found: dict[str, torch.dtype] = {}
    wrong: list[str] = []
    for use in _matmul_uses(model, input_ids):
        wanted = expected[use.module]
        has_weights = bool(list(use.module.parameters(recurse=False)))
        widens = isinstance(use.module, EmulatedLinear | OwnMatmuls) or not has_weights
        allowed = {wanted, torch.float32} if widens else {wanted}
        if not use.kernel <= allowed or (has_weights and use.operands != {wanted}):
            names = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in use.kernel | use.operands}))
            wrong.append(f"{use.name} computes in {names} instead of {str(wanted).removeprefix('torch.')}")
        found[use.name] = wanted if has_weights else use.result
    if wrong:
        raise UserError(f"the trainer does not compute in what the configuration says: {'; '.join(wrong)}")
    if not found:
        raise UserError(
            f"{type(model).__name__}: no matrix multiplication was seen in a forward pass, so none was audited"
        )
    return found


@dataclass
class _Use:
    """What one module multiplied matrices with."""

    name: str
    module: torch.nn.Module
    kernel: set[torch.dtype]  # of the operators' operands
    operands: set[torch.dtype]  # of the module's inputs and own weights, or what it rounds them to
    result: torch.dtype  # of what the module gives back


def _expected_dtypes(model: torch.nn.Module, precision: Precision) -> dict[torch.nn.Module, torch.dtype]:
    wide = {part for module in modules_in_fp32(model, precision.fp32_modules) for part in module.modules()}
    compute = torch_dtype(precision.compute)
    return {module: torch.float32 if module in wide else compute for module in model.modules()}


@torch.no_grad()
def _matmul_uses(model: torch.nn.Module, input_ids: torch.Tensor) -> list[_Use]:
    """The modules in whose own code matrices are multiplied, in the order of the forward pass."""
    uses: dict[torch.nn.Module, _Use] = {}
    running: list[tuple[str, torch.nn.Module, set[torch.dtype]]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.overloadpacket.__name__
            if running and (name in MATMULS or name.startswith("_scaled_dot_product")):
                running[-1][2].update(_dtypes(args))
            return function(*args, **(kwargs or {}))

    def enter(name: str) -> Any:
        return lambda module, args: running.append((name, module, set()))

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        name, _, kernel = running.pop()
        if kernel:
            weights = list(module.parameters(recurse=False))
            results = _dtypes([result]) or kernel
            operands = {module.dtype} if isinstance(module, RoundingLinear) else _dtypes([args, weights])
            uses[module] = _Use(name, module, kernel, operands, next(iter(results)))

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        with Recorder():
            model(input_ids=input_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return list(uses.values())


def _dtypes(values: Any) -> set[torch.dtype]:
    """The floating dtypes of all tensors in nested tuples and lists."""
    return {tensor.dtype for tensor in _tensors(values) if tensor.is_floating_point()}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


@dataclass
class Finding:
    """The first tensor that was not finite, by what it is of."""

    name: str | None = None

    def look(self, name: str, values: Any) -> None:
        if self.name is None and not all(tensor.detach().isfinite().all() for tensor in _tensors(values)):
            self.name = name


@contextmanager
def first_non_finite(model: torch.nn.Module) -> Iterator[Finding]:
    """Watch forward and backward passes inside the block; the finding names the first tensor with an infinity or NaN.

    Weights are looked at first, then what each module gives, then gradients as autograd reaches them. Costs a look at
    every tensor: for finding out, not for every step.
    """
    finding = Finding()
    for name, parameter in model.named_parameters():
        finding.look(f"weight {name}", parameter)

    def watch_output(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, result: Any) -> None:
            finding.look(f"output of {name}", result)
            for tensor in _tensors(result):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: finding.look(f"gradient of the output of {name}", gradient))

        return hook

    def watch_gradient(name: str) -> Any:
        return lambda gradient: finding.look(f"gradient of {name}", gradient)

    handles: list[Any] = [
        module.register_forward_hook(watch_output(name or type(model).__name__))
        for name, module in model.named_modules()
    ]
    handles += [
        parameter.register_hook(watch_gradient(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield finding
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def probe_overflow(model: torch.nn.Module, sequences: Iterable[torch.Tensor], dtype_name: str) -> None:
    """Run a forward pass on a few sequences of token ids; UserError where an activation is not finite."""
    for sequence in sequences:
        with first_non_finite(model) as finding:
            model(input_ids=sequence[None], use_cache=False)
        if finding.name:
            raise UserError(
                f"{finding.name} is not finite in {dtype_name} on a prompt: this model's activations leave the range "
                f"of the format. Compute in bf16, or keep the module in fp32 (fp32_modules)"
            )
