"""Which experts the routers of a mixture choose: recorded as a model computes, or given to it.

A router here is one that says which experts it took, as those of Qwen3-MoE and its relatives in transformers do: its
result has the experts' numbers, [tokens, k] of some integer type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.errors import UserError
from halfmatch.precision.casting import part_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What the numbers of experts are kept as.
KEPT = torch.int16


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers of a model, layer by layer; none for a dense model."""
    return [module for path, module in model.named_modules() if part_of(path.rpartition(".")[2], module) == "router"]


def is_mixture(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration has experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any((getattr(config.get_text_config(), name, None) or 0) > 1 for name in names)


class Recorder:
    """What every router chose in the last forward pass."""

    def __init__(self, layers: int):
        self._chosen: list[torch.Tensor | None] = [None] * layers

    def take(self) -> torch.Tensor:
        """[tokens, layers, k] int16: tokens as they lie in the batch, row by row."""
        chosen = [layer for layer in self._chosen if layer is not None]
        if len(chosen) < len(self._chosen):
            raise RuntimeError(f"{len(self._chosen) - len(chosen)} routers did not run")
        self._chosen = [None] * len(chosen)
        return torch.stack(chosen, dim=1).to(KEPT)

    def hook(self, layer: int) -> Any:
        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._chosen[layer] = _experts(module, output)

        return keep


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[Recorder]:
    """Record the routing of forward passes inside the block."""
    found = routers(model)
    if not found:
        raise UserError(f"{type(model).__name__} has no routers whose choices could be recorded")
    recorder = Recorder(len(found))
    handles = [router.register_forward_hook(recorder.hook(layer)) for layer, router in enumerate(found)]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replayed(model: torch.nn.Module, routing: torch.Tensor) -> Iterator[None]:
    """Inside the block every token takes the experts that are given: routing [B, T, layers, k] for input ids [B, T].

    Their weights are the model's own: the softmax of its router's logits at these experts, normalised where the model
    does that, and differentiable. With the experts that it would have chosen nothing changes, not a bit.
    """
    found = routers(model)
    if len(found) != routing.shape[2]:
        raise ValueError(f"routing of {routing.shape[2]} layers for a model with {len(found)} routers")

    def give(layer: int) -> Any:
        def replace(module: Any, args: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, _ = output
            chosen = routing[:, :, layer].flatten(0, 1).to(logits.device, torch.int64)
            probabilities = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
            if module.norm_topk_prob:
                probabilities = probabilities / probabilities.sum(-1, keepdim=True)
            return logits, probabilities.to(weights.dtype), chosen

        return replace

    for router in found:
        if not hasattr(router, "norm_topk_prob"):
            raise UserError(
                f"router_replay: how a {type(router).__name__} weighs its experts is not known here; it works for "
                "Qwen2-MoE, Qwen3-MoE and OLMoE"
            )
    # Before the hooks of a cast model, which round what a router in fp32 gives.
    handles = [router.register_forward_hook(give(layer), prepend=True) for layer, router in enumerate(found)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _experts(module: torch.nn.Module, output: Any) -> torch.Tensor:
    for part in output if isinstance(output, tuple) else ():
        if isinstance(part, torch.Tensor) and not part.is_floating_point():
            return part.detach()
    raise UserError(f"a {type(module).__name__} does not say which experts it chose, so its routing is not recorded")
