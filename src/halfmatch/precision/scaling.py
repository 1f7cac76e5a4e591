"""Dynamic loss scaling: fp16 gradients below 6e-8 are zero, so the loss is multiplied up before the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from halfmatch.precision import LossScaling


class LossScaler:
    """The scale and how it moves, as `torch.amp.GradScaler` defines it, with bounds.

    An overflow multiplies the scale by the backoff factor at once; `growth_interval` steps without one multiply it by
    the growth factor. The scale is a float32 number. What torch's class does beside this (find the optimizer's
    parameters, decide on the step) is the trainer's.
    """

    def __init__(self, settings: LossScaling):
        self.settings = settings
        self.factor = float(np.float32(settings.initial_scale))
        self.steps_since_change = 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run the backward pass from."""
        return loss * self.factor

    @torch.no_grad()
    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide float32 gradients by the scale, in place."""
        if any(gradient.dtype != torch.float32 for gradient in gradients):
            raise TypeError("only float32 gradients can be unscaled: 16-bit ones would lose what the scale has saved")
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.factor)

    def update(self, *, overflow: bool) -> None:
        """Move the scale after a step: `overflow` says that a gradient was not finite and the step was left out."""
        if overflow:
            self._move(self.settings.backoff_factor)
            return
        self.steps_since_change += 1
        if self.steps_since_change == self.settings.growth_interval:
            self._move(self.settings.growth_factor)

    def _move(self, multiplier: float) -> None:
        bounded = min(max(self.factor * multiplier, self.settings.min_scale), self.settings.max_scale)
        self.factor = float(np.float32(bounded))
        self.steps_since_change = 0

    @property
    def at_minimum(self) -> bool:
        return self.factor <= self.settings.min_scale

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "steps_since_change": self.steps_since_change}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factor = state["factor"]
        self.steps_since_change = state["steps_since_change"]
