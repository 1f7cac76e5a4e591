"""What vLLM is started with on a CPU, and what on GPUs: its memory, and how it works through prompts.

Importing this module does not import vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfmatch.precision import torch_dtype

if TYPE_CHECKING:
    from halfmatch.config import EngineSettings
    from halfmatch.precision import DType

# Tokens of KV cache a slot on a CPU. Longer sequences fit; more of them than fit at once wait for their turn.
CPU_CACHE_TOKENS_A_SLOT = 2048


def settings_for(model: Path, dtype: DType, settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vllm.LLM that differ between a CPU and GPUs."""
    if settings.device == "cpu":
        import psutil

        token_bytes, context = _cache_bytes_a_token(model, torch_dtype(dtype))
        available = psutil.virtual_memory().available
        return {
            # Compiling for a CPU takes minutes and no run here lasts long enough to win them back.
            "enforce_eager": True,
            # A prompt is prefilled in one step: where it is cut, vLLM moves the offset of the request's generator back,
            # which generators on a CPU do not have.
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": cpu_cache_bytes(
                token_bytes, context, settings.slots, settings.gpu_memory, available
            ),
        }
    return {"gpu_memory_utilization": settings.gpu_memory, **_launcher(os.environ)}


def _launcher(environment: Mapping[str, str]) -> dict[str, Any]:
    """Among the ranks of a training run the engine lives on the rank's own GPU, or with tensor parallelism on those of
    ranks side by side; alone it starts what processes it needs."""
    several = int(environment.get("WORLD_SIZE", "1")) > 1
    return {"distributed_executor_backend": "external_launcher"} if several else {}


def cpu_cache_bytes(token_bytes: int, context: int, slots: int, share: float, available: int) -> int:
    """Bytes of KV cache on a CPU, where vLLM's own choice would take a share of the whole machine from every job.

    Enough for `slots` sequences of CPU_CACHE_TOKENS_A_SLOT tokens and for one of the whole context, but at most `share`
    of the `available` bytes; a token takes `token_bytes`, a sequence at most `context` tokens.
    """
    # One block (128 tokens on a CPU) a sequence is partly empty, and one block is vLLM's own.
    block = 128
    tokens = max(slots * (min(context, CPU_CACHE_TOKENS_A_SLOT) + block), context) + block
    return min(tokens * token_bytes, int(share * available))


def _cache_bytes_a_token(model: Path, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of keys and values a token, and the context length, from a model folder's configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize, config.max_position_embeddings
