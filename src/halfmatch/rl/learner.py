"""A model in training: the weights that it computes with, their float32 masters, AdamW, and the loss scale.

On one rank the model holds its weights in the compute dtype and the masters lie apart; on several ranks it is sharded,
and the shards are the masters (halfmatch.precision.sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from halfmatch.config import Lora, Training
from halfmatch.precision import Precision, torch_dtype
from halfmatch.precision.casting import cast_model, prepare_model
from halfmatch.precision.masters import MasterWeights
from halfmatch.precision.monitors import first_non_finite
from halfmatch.precision.scaling import LossScaler
from halfmatch.precision.sharding import ShardedWeights, blocks, shard
from halfmatch.rl.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
# What AdamW remembers of a parameter, beside the number of steps.
MOMENTS = ("exp_avg", "exp_avg_sq")


def place(model: PreTrainedModel, precision: Precision, ranks: Ranks = ALONE) -> None:
    """Make a float32 model compute in a precision, in place, and shard it where there are several ranks."""
    arguments = precision.compute, precision.fp32_modules, precision.emulate
    if ranks.mesh is None:
        cast_model(model, *arguments)
    else:
        prepare_model(model, *arguments, device=ranks.mesh.device_type)
        shard(model, precision, ranks.mesh)


def frozen_copy(model: PreTrainedModel, precision: Precision, ranks: Ranks = ALONE) -> PreTrainedModel:
    """A copy of a float32 model, placed like the model itself, that nobody trains."""
    copy = deepcopy(model)
    place(copy, precision, ranks)
    # Gathered weights change without a trace, so what is computed from them must not be kept, as it is of frozen ones.
    return copy.requires_grad_(ranks.mesh is not None)


class Learner:
    """One model with what trains it: `update` is one optimizer step."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Training,
        precision: Precision,
        ranks: Ranks = ALONE,
        *,
        lora: Lora | None = None,
        seed: int = 0,
    ):
        """`model`: float32, on its device; it is cast here, in place. lora: train an adapter alone (`seed`: of it)."""
        self.model, self.precision, self.lora, self.ranks = model, precision, lora, ranks
        self.clip_norm, self.shard_gradients = settings.clip_norm, settings.shard_gradients
        model.requires_grad_(True)
        if lora:
            from halfmatch.models.lora import add_adapter  # needs peft, which is not installed everywhere

            add_adapter(model, lora, seed)
        initial = {}  # float32 weights for the masters; of a sharded model the shards are that
        if ranks.mesh is None:
            trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
            initial = {name: weight.detach().clone() for name, weight in trained}
        if settings.activation_checkpointing:
            for block in blocks(model):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        place(model, precision, ranks)
        self.masters: MasterWeights | ShardedWeights = (
            MasterWeights(model, initial, torch_dtype(precision.reduce))
            if ranks.mesh is None
            else ShardedWeights(model)
        )
        self.optimizer = torch.optim.AdamW(
            self.masters.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.scaler = LossScaler(precision.loss_scaling) if precision.loss_scaling else None
        # This rank's part of θ_0, on the CPU, for as long as somebody looks at how far the weights have moved.
        self.initial = {name: _local(weight).clone() for name, weight in self.masters.tensors().items()}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole float32 weights of the model as it was given here; with an adapter, merged into them."""
        if self.lora is None:
            return self.masters.named()
        from halfmatch.models.lora import merged_weights

        return merged_weights(self.model, dict(self.masters.named()), self.precision)

    def engine_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a rollout engine loads: all weights, or the adapter's where it computes that unmerged."""
        return self.masters.named() if self.lora and self.lora.push == "unmerged" else self.weights()

    @property
    def loss_scale(self) -> float | None:
        return self.scaler.factor if self.scaler else None

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch's loss to the masters'. `last` of the step: only then are gradients
        summed over ranks, which hold whole ones until then, unless they are to hold shards alone."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or self.shard_gradients)
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def update(self, accumulate: Callable[[], T], learning_rate: float) -> tuple[T, dict[str, Any]]:
        """One optimizer step, left out where a gradient is not finite: what `accumulate` gives, and the log's columns.

        `accumulate` runs the forward and `backward` passes. Where the step is left out it runs once more, at the same
        loss scale, to be watched for the first tensor that is not finite.
        """
        scale, culprit = self.loss_scale, None
        result = accumulate()
        norm = self.step(learning_rate)
        skipped = norm != norm
        if skipped:
            with first_non_finite(self.model) as finding:
                accumulate()
            self.masters.clear_gradients()
            culprit = next((name for name in self.ranks.gather([finding.name]) if name), None)
        self.adjust_scale(overflow=skipped)
        columns = {"gradient_norm": norm, "loss_scale": scale, "step_skipped": skipped, "first_non_finite": culprit}
        return result, columns

    def step(self, learning_rate: float) -> float:
        """Move the weights by the gradients, which are cleared; returns their norm before clipping.

        Where a gradient is not finite, on any rank, the norm is NaN and nothing moves. `adjust_scale` follows.
        """
        if self.scaler:
            self.scaler.unscale(self.masters.gradients)
        norm = self.masters.clip_gradients(self.clip_norm)
        if norm == norm:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.masters.round_into_model()
        self.masters.clear_gradients()
        return norm

    def adjust_scale(self, *, overflow: bool) -> None:
        if self.scaler:
            self.scaler.update(overflow=overflow)

    def change(self) -> float:
        """|θ − θ_0| / |θ_0| of the masters."""
        start, now = list(self.initial.values()), list(map(_local, self.masters.tensors().values()))
        norms = torch.stack(
            [torch.nn.utils.get_total_norm(part) for part in (torch._foreach_sub(now, start), tuple(start))]
        )
        if self.ranks.size > 1:  # every rank has rows of its own
            norms = self.ranks.sum(norms.square()).sqrt()
        return (norms[0] / norms[1]).item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, to be stored or filled: zeros where the optimizer has not stepped yet."""
        found = {f"master.{name}": weight for name, weight in self.masters.tensors().items()}
        for name, parameter in self.masters.parameters.items():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            found |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
        return found

    def state(self) -> dict[str, Any]:
        """What is no tensor: the optimizer's steps and the loss scale."""
        steps = [int(state["step"]) for state in self.optimizer.state.values()]
        return {"steps": steps, "scaler": self.scaler.state_dict() if self.scaler else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, after `tensors` were filled."""
        for of_parameter, steps in zip(self.optimizer.state.values(), state["steps"], strict=True):
            of_parameter["step"].fill_(steps)
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        self.masters.round_into_model()


def _local(weight: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a weight, on the CPU."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).cpu()
