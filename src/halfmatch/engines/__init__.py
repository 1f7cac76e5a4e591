"""The rollout engine: what the policy μ samples with.

Importing this module does not import torch or vLLM; `create` imports the engine it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from halfmatch.errors import UserError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from halfmatch.config import EngineSettings, Lora, Sampling
    from halfmatch.precision import DType, Precision


@dataclass(frozen=True)
class Request:
    """One completion to sample. The same seed gives the same completion, whatever else is in the batch."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One sampled response: token ids (EOS included) and the log-prob in nats of each.

    The log-probs are of the distribution that was sampled from: after temperature and nucleus, from logits rounded to
    the rollout dtype. `routing`, where it was asked for: the experts that each position took, of the prompt and of all
    sampled tokens but the last, which no forward pass has seen: [positions, layers, k] int16.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    routing: NDArray[Any] | None = field(default=None, compare=False, repr=False)


class NonFiniteError(UserError):
    """The engine's weights or logits are infinite or NaN: nothing that it could sample would mean anything."""


class Engine(Protocol):
    """A rollout engine. It computes in `dtype`, which is what it really uses and not what was asked for."""

    @property
    def dtype(self) -> DType: ...

    @property
    def description(self) -> Mapping[str, Any]:
        """What provenance records: name, version, attention, emulation, device."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights (Hugging Face names), rounding them to `dtype`, and drop every cache.

        An engine that was made with an adapter keeps its weights and takes the adapter's (names as in the trainer).
        """
        ...

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests.

        `progress` is told how many completions have finished since it was last told.
        """
        ...

    def sleep(self) -> None:
        """Give back what memory the engine can do without until it is woken: to the trainer, between rollouts and sync.

        It wakes as it went to sleep, and by itself where it is given weights or requests.
        """
        ...

    def wake(self) -> None:
        """Take the memory again; nothing where the engine is awake."""
        ...

    def close(self) -> None: ...


def side_of(name: str) -> Literal["compute", "rollout"]:
    """Which dtype of a precision an engine computes in: the training engine in the trainer's, the others in their
    own."""
    return "compute" if name == "trainer" else "rollout"


def create(
    name: str,
    model: Path,
    precision: Precision,
    settings: EngineSettings,
    *,
    adapter: Lora | None = None,
    record_routing: bool = False,
) -> Engine:
    """Start an engine on a model folder. It samples in the dtype of its side of `precision`, with
    `precision.fp32_modules` in fp32.

    adapter: compute a LoRA adapter beside the weights, unmerged. record_routing: say which experts a completion took;
    the transformers engine alone does (vLLM can on GPUs, by enable_return_routed_experts, which is not used here).
    """
    if record_routing and name != "transformers":
        raise UserError(f"training.router_replay: the engine {name} does not give its routing; use transformers")
    if name == "vllm" and settings.server:
        from halfmatch.engines.server import ServerEngine

        return ServerEngine(model, precision, settings)
    if settings.data_parallel > 1:
        from halfmatch.engines.replicas import ReplicatedEngine

        start = partial(create, adapter=adapter, record_routing=record_routing)
        return ReplicatedEngine(start, name, model, precision, settings)
    if name == "transformers":
        from halfmatch.engines.transformers import TransformersEngine

        return TransformersEngine(model, precision, settings, adapter=adapter, record_routing=record_routing)
    if name == "trainer":
        from halfmatch.engines.full_pass import FullPassEngine

        return FullPassEngine(model, precision, settings)
    if name == "vllm":
        from halfmatch.engines.vllm import VllmEngine

        return VllmEngine(model, precision, settings, adapter=adapter)
    raise ValueError(f"unknown engine {name!r}; known: transformers, vllm, trainer")
