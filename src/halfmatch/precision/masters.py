"""fp32 master weights, apart from the parameters that the model computes with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor


class MasterWeights:
    """The weights that the optimizer moves. They and their gradients are float32; the model may compute in 16 bits.

    A 16-bit gradient is added to its master's float32 gradient as soon as autograd has it, and freed. After an
    optimizer step `round_into_model` rounds each master once into the parameter. A parameter that is float32 already (a
    float32 model, modules kept in float32) is its own master, so there is no second copy. Tied weights are one
    parameter and have one master.
    """

    def __init__(
        self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor], reduce: torch.dtype = torch.float32
    ):
        """`weights`: the float32 weights by parameter name, as they were before the model was cast. `reduce`: the dtype
        that the running sum of gradients over micro-batches is rounded to."""
        self.reduce = reduce
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self._computed: dict[str, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            own = parameter.dtype == torch.float32
            master = parameter if own else torch.nn.Parameter(weights[name].detach().to(torch.float32, copy=True))
            self.parameters[name] = master
            self._computed[name] = parameter
            if not own or reduce != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._collector(master))
        with torch.no_grad():
            for name, master in self.parameters.items():
                master.copy_(weights[name])
        self.round_into_model()

    def _collector(self, master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        """The hook that moves a new gradient into the master's."""

        def collect(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            total = parameter.grad.float()
            if parameter is not master:
                parameter.grad = None
                if master.grad is not None:
                    total = master.grad.add_(total)
            master.grad = total.to(self.reduce).float()

        return collect

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Every master's gradient, of those that have one."""
        return [master.grad for master in self.parameters.values() if master.grad is not None]

    def clip_gradients(self, max_norm: float | None) -> float:
        """Scale the gradients down to a global norm of at most `max_norm`; returns the norm before, NaN if not finite.

        Gradients with a NaN or an infinity are left as they are.
        """
        return clip_to_norm(self.parameters.values(), max_norm)

    def clear_gradients(self) -> None:
        for master in self.parameters.values():
            master.grad = None

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Round every master into the parameter that the model computes with."""
        for name, master in self.parameters.items():
            if self._computed[name] is not master:
                self._computed[name].copy_(master)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and float32 weights, what a checkpoint stores and a rollout engine loads."""
        return ((name, master.detach()) for name, master in self.parameters.items())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Names and float32 weights to be read or filled; `round_into_model` follows where they were filled."""
        return dict(self.named())


def clip_to_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> float:
    """Scale the gradients of some parameters, whole or sharded, down to a global norm of at most `max_norm`.

    Returns the norm before, NaN if it is not finite; such gradients are left as they are.
    """
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not math.isfinite(norm):
        return math.nan
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
