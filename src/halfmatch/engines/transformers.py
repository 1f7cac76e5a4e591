"""The `transformers` engine: KV-cache decoding of any causal LM, batched, slots refilled as sequences end.

A completion depends on its request (prompt, seed), the sampling settings and the weights alone, bit for bit: not on the
other requests, their order, or the number of slots. On a CPU, with one thread, this is what makes it so:
- each prompt is prefilled by itself, and its keys and values are copied to the slots of its samples;
- a decoding step runs on a multiple of 8 rows (slots without a sequence are padding): a row of an fp32 matmul has the
  same bits for any such number of rows;
- attention pads each slot on the right to a multiple of 64 positions and sums block by block, so what other slots need
  in length changes nothing (`halfmatch.precision.attention`);
- the numbers of place t of a request's own generator draw its token t.
An expert of a mixture gets as many rows as the batch sends it; fewer than 8 are padded too
(`halfmatch.precision.own_matmuls`). On a GPU the kernels that are chosen by shape are not under this module's control:
the first and the last point hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from halfmatch import models
from halfmatch.engines import Completion, NonFiniteError, Request
from halfmatch.engines.decoding import Decoding
from halfmatch.errors import UserError
from halfmatch.models import routing
from halfmatch.precision import dtype_name, torch_dtype
from halfmatch.precision.casting import cast_model
from halfmatch.precision.emulation import RoundingLinear, drop_upcast_weights, is_emulated

if TYPE_CHECKING:
    from halfmatch.config import EngineSettings, Lora, Sampling
    from halfmatch.precision import DType, Precision

_ATTENTION_LAYERS = ("full_attention", "sliding_attention")


class TransformersEngine:
    """`engines.Engine` on a model folder; see `halfmatch.engines.create`."""

    def __init__(
        self,
        model: Path,
        precision: Precision,
        settings: EngineSettings,
        *,
        adapter: Lora | None = None,
        record_routing: bool = False,
    ):
        self._slots, self._draws, self._record_routing = settings.slots, settings.draws, record_routing
        self._device = torch.device(settings.device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device is cuda, and torch sees no GPU on this machine; set it to cpu")
        loaded = models.load(model, torch.float32 if precision.fp32_modules else torch_dtype(precision.rollout))
        self._model = loaded.to(self._device)
        self._adapter: frozenset[str] = frozenset()  # the names of its weights, which alone are then replaced
        if adapter:
            from halfmatch.models import lora  # needs peft, which is not installed everywhere

            lora.add_adapter(self._model, adapter, seed=0)
            self._adapter = frozenset(lora.adapter_weights(self._model))
        cast_model(self._model, precision.rollout, precision.fp32_modules, precision.emulate)
        self._config = self._model.config.get_text_config()
        check_layers(self._config, model)
        self.description: Mapping[str, Any] = {
            "name": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
            "dtype": self.dtype,
            "fp32_modules": sorted(precision.fp32_modules),
            "attention": self._model.config._attn_implementation,
            "emulated": is_emulated(precision.rollout, precision.emulate, settings.device),
        }

    @property
    def dtype(self) -> DType:
        """What the decoder's matmuls multiply, read from the layers themselves."""
        ends = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        sizes: Counter[torch.dtype] = Counter()
        for module in self._model.modules():
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dim() > 1 and module not in ends:
                rounded_to = module.dtype if isinstance(module, RoundingLinear) else weight.dtype
                sizes[rounded_to] += weight.numel()
        return dtype_name(sizes.most_common(1)[0][0])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, rounding each to the dtype that it is held in; no cache outlives a `generate`.

        Names are Hugging Face's; a tied LM head may be given or left out. Nothing changes if a name is missing or
        unknown or a shape differs.
        """
        self.wake()
        given = dict(weights)
        held = dict(self._model.named_parameters(remove_duplicate=False))
        if self._adapter:
            held = {name: held[name] for name in sorted(self._adapter)}
        if unknown := sorted(given.keys() - held.keys()):
            raise ValueError(f"the engine's model has no weights named {_some(unknown)}")
        covered = {id(held[name]) for name in given}
        if missing := [name for name, parameter in held.items() if id(parameter) not in covered]:
            raise ValueError(f"the weights given to the engine lack {_some(missing)}")
        tied: dict[int, str] = {}
        for name, tensor in given.items():
            first = tied.setdefault(id(held[name]), name)
            if first != name and not torch.equal(tensor, given[first]):
                raise ValueError(
                    f"{first} and {name} are one weight in the engine's model, and the values given differ"
                )
            if tensor.shape != held[name].shape:
                raise ValueError(
                    f"weight {name} has shape {tuple(tensor.shape)}, the engine's model {tuple(held[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in given.items():
                held[name].copy_(tensor)
        for name, tensor in given.items():
            if not torch.isfinite(held[name]).all():
                was = "is" if not torch.isfinite(tensor).all() else f"overflows {dtype_name(held[name].dtype)}: it is"
                raise NonFiniteError(f"weight {name} {was} not finite")

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample one completion a request; `progress` is told how many have finished since it was last told."""
        self.wake()
        self._check_requests(requests, sampling)
        with routing.recorded(self._model) if self._record_routing else nullcontext() as recorder:
            return Decoding(
                self._model, requests, sampling, stop_token_ids, self._slots, progress, recorder, self._draws
            ).run()

    def sleep(self) -> None:
        """Weights that are upcast for emulated matmuls go, and a GPU's weights go to the host; the KV caches of a
        `generate` went with it."""
        drop_upcast_weights(self._model)
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._model.to(self._device)

    def close(self) -> None:
        del self._model

    def _check_requests(self, requests: Sequence[Request], sampling: Sampling) -> None:
        limit = getattr(self._config, "max_position_embeddings", None)
        window = getattr(self._config, "sliding_window", None) if _has_sliding_layers(self._config) else None
        for index, request in enumerate(requests):
            length = len(request.prompt_ids) + sampling.max_tokens
            if not request.prompt_ids:
                raise UserError(f"request {index} has an empty prompt; there is nothing to continue")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._config.vocab_size:
                raise UserError(
                    f"request {index} has token ids beyond the model's vocabulary of {self._config.vocab_size}"
                )
            if limit is not None and length > limit:
                raise UserError(
                    f"request {index}: {len(request.prompt_ids)} prompt tokens and max_tokens {sampling.max_tokens} "
                    f"are more than the model's {limit} positions; lower max_tokens or leave long prompts out"
                )
            if window is not None and length > window:
                raise UserError(
                    f"request {index}: {length} tokens are more than the model's sliding window of {window}, which the "
                    "transformers engine does not cut; lower max_tokens or use engine vllm"
                )


def _has_sliding_layers(config: transformers.PretrainedConfig) -> bool:
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None


def check_layers(config: transformers.PretrainedConfig, model: Path) -> None:
    """Refuse layers that keep more than keys and values of every position."""
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION_LAYERS)
    if kinds or config.is_encoder_decoder:
        raise UserError(
            f"{model}: the transformers engine decodes decoder-only models with plain attention, and this one has "
            f"{', '.join(sorted(kinds)) or 'an encoder'}; use engine vllm"
        )


def _some(names: Iterable[str]) -> str:
    """A few of many names."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
