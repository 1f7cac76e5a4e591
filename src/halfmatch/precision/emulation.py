"""16-bit matmuls on a CPU as a tensor core computes them: fp32 accumulation of the 16-bit inputs, one rounding.

Products of two 16-bit numbers are exact in fp32, so an fp32 matmul of the upcast inputs differs from a 16-bit unit only
in the order of its sums. `RoundingLinear` leaves the rounding of the result out, on any device.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear as fp32_linear

if TYPE_CHECKING:
    from halfmatch.precision import DType, Emulate

# From so many rows on, a row of a matmul on a CPU has the same bits however many there are.
ROWS = 8
# What the kernel calls the units that multiply 16-bit numbers and accumulate in fp32, on x86 and on Arm.
_UNITS: dict[str, frozenset[str]] = {
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16"}),
}


def cpu_units() -> frozenset[str]:
    """The 16-bit matmul units of this CPU, by the kernel's names; empty where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.split(":", 1)[1] for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.split()) & (_UNITS["bf16"] | _UNITS["fp16"])


def is_emulated(dtype: DType, emulate: Emulate, device: str) -> bool:
    """Whether matmuls in `dtype` on `device` run through `linear` below instead of PyTorch's native kernels."""
    if dtype == "fp32" or torch.device(device).type != "cpu" or emulate == "never":
        return False
    return emulate == "always" or not (cpu_units() & _UNITS[dtype])


def _rounded_linear(x: torch.Tensor, w_fp32: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return fp32_linear(x.float(), w_fp32, None if b is None else b.float()).to(x.dtype)


class _Linear(torch.autograd.Function):
    """x [..., in], w [out, in], b [out] or None, all of one 16-bit dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return _rounded_linear(x, w.float(), b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy_fp32 = dy.float()
        rows = dy_fp32.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (dy_fp32 @ w.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = (rows.T @ x.float().reshape(-1, x.shape[-1])).to(w.dtype)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0).to(x.dtype)
        return dx, dw, db


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """y = round(x wᵀ + b): x [..., in], w [out, in], b [out] of one 16-bit dtype, accumulated in fp32, rounded once.

    Backward alike: dx = round(dy w), dw = round(dyᵀ x), db = round(Σ dy).
    """
    if x.dtype != w.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"emulated matmuls take two tensors of one 16-bit dtype, not {x.dtype} and {w.dtype}")
    return _Linear.apply(x, w, b)


class EmulatedLinear(torch.nn.Linear):
    """A Linear layer whose matmul is `linear`; it shares the parameters of the layer that it replaces.

    Outside of autograd the upcast weight of a model that is not trained is kept until the weight changes. Change such
    weights under `torch.no_grad()`: writes through `.data` leave no trace that could be seen here, and neither do those
    of a fused optimizer, which is why weights that require a gradient are upcast anew.
    """

    def __init__(self, layer: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)
        self._upcast: tuple[tuple[int, int], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or x.dtype != self.weight.dtype:
            return linear(x, self.weight, self.bias)
        return _rounded_linear(x, self._upcast_weight(), self.bias)

    def _upcast_weight(self) -> torch.Tensor:
        if self.weight.requires_grad:
            return self._sixteen_bit_weight().float()
        state = (self.weight.data_ptr(), self.weight._version)
        if self._upcast is None or self._upcast[0] != state:
            self._upcast = (state, self._sixteen_bit_weight().float())
        return self._upcast[1]

    def _sixteen_bit_weight(self) -> torch.Tensor:
        return self.weight.detach()


def drop_upcast_weights(model: torch.nn.Module) -> None:
    """Free the fp32 copies of weights that a model's emulated layers keep; the next use makes them again."""
    for layer in model.modules():
        if isinstance(layer, EmulatedLinear):
            layer._upcast = None


class _RoundingLinear(torch.autograd.Function):
    """x [..., in], w [out, in], b [out] or None: fp32; `dtype`: what the inputs of the three matmuls are rounded to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        x, w = x.to(dtype), w.to(dtype)
        ctx.save_for_backward(x, w)
        return fp32_linear(x.float(), w.float(), b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy_rounded = dy.to(x.dtype).float()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy_rounded @ w.float()
        if ctx.needs_input_grad[1]:
            dw = dy_rounded.flatten(0, -2).T @ x.float().flatten(0, -2)
        if ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0)
        return dx, dw, db, None


class RoundingLinear(EmulatedLinear):
    """A Linear layer in fp32 but for the inputs of its matmuls, which are rounded to `dtype`, forward and backward."""

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype):
        super().__init__(layer)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return _RoundingLinear.apply(x.float(), self.weight, self.bias, self.dtype)
        return fp32_linear(x.to(self.dtype).float(), self._upcast_weight(), self.bias)

    def _sixteen_bit_weight(self) -> torch.Tensor:
        return self.weight.detach().to(self.dtype)
