"""Hidden states of a model's operations, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from halfmatch.errors import UserError
from halfmatch.precision.casting import part_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Operation:
    """A place in a model: norm, attention or mlp of a layer, the residual stream behind a layer, final norm, head."""

    layer: int | None  # None behind the layers
    kind: str
    path: str  # of the module whose output it is


def operations(model: PreTrainedModel) -> list[Operation]:
    """All of them, layer by layer and the LM head last; within a layer in the order in which the model lists them."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers = getattr(decoder, "layers", None)
    if layers is None or head is None:
        raise UserError(f"{type(model).__name__} is no stack of decoder layers with an LM head, so it cannot be traced")
    paths = {module: path for path, module in model.named_modules()}
    found = []
    for number, layer in enumerate(layers):
        for name, child in layer.named_children():
            part = part_of(name, child)
            if part in ("norm", "attention", "mlp"):
                found.append(Operation(number, part, paths[child]))
        found.append(Operation(number, "residual", paths[layer]))
    for name, child in decoder.named_children():
        if part_of(name, child) == "norm":
            found.append(Operation(None, "norm", paths[child]))
    return [*found, Operation(None, "lm_head", paths[head])]


@dataclass
class Calls:
    """What a module was called with and what it gave, [1, T, ·] each, positions of several calls behind each other.

    `arguments` are all of the last call's, but for the hidden states.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})

    @property
    def given(self) -> torch.Tensor:
        return torch.cat(self.inputs, dim=1)

    @property
    def result(self) -> torch.Tensor:
        return torch.cat(self.outputs, dim=1)

    def repeat(self, module: Callable[..., Any], states: torch.Tensor) -> torch.Tensor:
        """What a module gives for other hidden states in the place of the last call's."""
        positional, named = self.arguments
        if "hidden_states" in named:
            return _first(module(*positional, **{**named, "hidden_states": states}))
        return _first(module(states, *positional[1:], **named))


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def traced(model: torch.nn.Module, places: Sequence[Operation]) -> Iterator[dict[str, Calls]]:
    """The calls of the modules at these places in forward passes inside the block, of the first row of each batch: by
    path, in the order in which the modules gave their first result."""
    calls: dict[str, Calls] = {}

    def watch(path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            one = calls.setdefault(path, Calls())
            one.inputs.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[:1])
            one.outputs.append(_first(output)[:1])
            one.arguments = (args, kwargs)

        return hook

    modules = dict(model.named_modules())
    handles = [modules[one.path].register_forward_hook(watch(one.path), with_kwargs=True) for one in places]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class InFloat64(TorchFunctionMode):
    """Inside, float32 is float64: models ask for float32 by name in norms, softmax and rotary angles."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
