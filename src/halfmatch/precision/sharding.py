"""Split a model over the ranks of a run with FSDP2: float32 shards, gathered in the compute dtype where they are used.

The same arithmetic as on one rank: every float32 weight is rounded once into the compute dtype, every 16-bit gradient
is added up in `Precision.reduce`, over micro-batches first and then over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from halfmatch.precision import Precision, torch_dtype
from halfmatch.precision.casting import modules_in_fp32
from halfmatch.precision.masters import clip_to_norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard(model: PreTrainedModel, precision: Precision, mesh: DeviceMesh) -> None:
    """Split a float32 model that `prepare_model` has made ready, in place: its parameters become shards.

    A decoder block is gathered at a time. Modules in fp32 are gathered in fp32, apart from the rest. Gradients are
    summed over ranks, not averaged: each rank's loss is its share of the whole.
    """
    reduce = torch_dtype(precision.reduce)
    wide = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    compute = wide
    if "between_matmuls" not in precision.fp32_modules or precision.compute == "fp32":
        compute = MixedPrecisionPolicy(torch_dtype(precision.compute), reduce, cast_forward_inputs=False)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        for module in modules_in_fp32(model, precision.fp32_modules):
            tied = module is head and head.weight is embedding.weight
            if list(module.parameters()):
                fully_shard([embedding, head] if tied else module, mesh=mesh, mp_policy=wide)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=compute)
    fully_shard(model, mesh=mesh, mp_policy=compute)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a division by 1 would need an operation that gloo lacks


def blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder blocks of a model, the parts that are worth computing or gathering one at a time."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


class ShardedWeights:
    """The weights of a sharded model, as `MasterWeights` has those of a whole one: the shards are the masters.

    Every rank calls every method, as all but `clear_gradients` and `round_into_model` talk to the others.
    """

    def __init__(self, model: torch.nn.Module):
        self._gathering = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Every shard's gradient, of those that have one."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def clip_gradients(self, max_norm: float | None) -> float:
        """As `MasterWeights.clip_gradients`; the norm is that of all shards, so that all ranks do the same."""
        return clip_to_norm(self.parameters.values(), max_norm)

    def clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def round_into_model(self) -> None:
        """Let go of what was gathered from other weights; the next gathering rounds anew."""
        for module in self._gathering:
            module.reshard()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole float32 weights, one at a time."""
        for name, parameter in self.parameters.items():
            shards = parameter.detach()
            assert isinstance(shards, DTensor)
            yield name, shards.full_tensor()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Names and float32 shards."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}
