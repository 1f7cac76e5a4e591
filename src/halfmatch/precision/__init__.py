"""What a precision means: one object that drives the trainer, the rollout engine and the evaluation.

Importing this module does not import torch, so that the configuration can be read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self, get_args

from pydantic import Field, model_validator

from halfmatch.config_section import Section

if TYPE_CHECKING:
    import torch

DType = Literal["bf16", "fp16", "fp32"]
Fp32Module = Literal["lm_head", "norm", "value_head", "router", "attention", "mlp", "between_matmuls"]
Emulate = Literal["auto", "always", "never"]

_TORCH_NAMES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype that a precision name stands for."""
    import torch

    return getattr(torch, _TORCH_NAMES[dtype])


def dtype_name(dtype: torch.dtype) -> DType:
    """The inverse of `torch_dtype`."""
    return next(name for name in get_args(DType) if torch_dtype(name) == dtype)


class LossScaling(Section):
    """Dynamic loss scaling as of torch's GradScaler: grow after `growth_interval` finite steps, back off at once."""

    initial_scale: float = Field(65536.0, gt=0, description="first scale [paper: 65,536]")
    growth_factor: float = Field(2.0, gt=1, description="multiplies the scale after growth_interval finite steps")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="multiplies the scale after an overflow")
    growth_interval: int = Field(400, ge=1, description="finite steps before the scale grows [paper: 400 or 1,000]")
    min_scale: float = Field(1.0, gt=0, description="the scale never backs off below this")
    max_scale: float = Field(2.0**24, gt=0, description="the scale never grows above this")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale {self.initial_scale:g} must lie between min_scale {self.min_scale:g} "
                f"and max_scale {self.max_scale:g}"
            )
        return self


class Precision(Section):
    """In which number format each part of training and sampling computes.

    Master weights, optimizer state, softmax, log-softmax and losses are always float32. `fp32_modules` hold for the
    trainer and for the rollout engine alike. fp16 implies dynamic loss scaling; bf16 and fp32 use none.
    """

    compute: DType = Field(description="matmuls and activations of the trainer")
    rollout: DType = Field(description="what the rollout engine holds and computes in")
    master: Literal["fp32"] = Field(
        "fp32", description="master weights and optimizer state; 16-bit masters are refused"
    )
    reduce: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="gradient accumulation and reduction")
    fp32_modules: tuple[Fp32Module, ...] = Field(
        (),
        description="parts computed in fp32 by the trainer and the engine: lm_head, norm, value_head, router, "
        "attention, mlp; between_matmuls is everything but the inputs of matmuls",
    )
    loss_scaling: LossScaling | None = Field(
        None, description="dynamic loss scaling; fp16 compute only, and always there"
    )
    emulate: Emulate = Field(
        "auto",
        description="16-bit matmuls on a CPU as fp32 accumulation and one rounding: auto (where the CPU has no units "
        "for the dtype), always, never",
    )

    @model_validator(mode="before")
    @classmethod
    def _fp16_scales(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("compute") == "fp16" and "loss_scaling" not in data:
            return {**data, "loss_scaling": {}}
        return data

    @model_validator(mode="after")
    def _scaling_fits(self) -> Self:
        if self.compute == "fp16" and self.loss_scaling is None:
            raise ValueError(
                "compute: fp16 needs loss scaling (gradients below 6e-8 become zero without it); leave loss_scaling "
                "out for the default or give its values"
            )
        if self.compute != "fp16" and self.loss_scaling is not None:
            raise ValueError(f"compute: {self.compute} has fp32's range and takes no loss scaling; remove loss_scaling")
        return self

    @classmethod
    def named(cls, name: DType, **changes: object) -> Precision:
        """The precision that computes and samples in one dtype: "bf16", "fp16" or "fp32"."""
        if name not in _TORCH_NAMES:
            raise ValueError(f"unknown precision {name!r}; known: {', '.join(_TORCH_NAMES)}")
        return cls.model_validate({"compute": name, "rollout": name, **changes})
