"""Peak memory of the log-probs of given tokens, forward and backward, against other ways at a large vocabulary.

    python benchmarks/logprob_memory.py [--vocabulary 151936] [--tokens 2048]

The model is no more than an embedding and an LM head, so that the vocabulary decides. `token_logprobs` is compared with
`log_softmax(logits.float())` and `gather`, as one would write it at a first go, and with two ways of TRL: the one from
logits, which its trainer had, and the one that multiplies by the LM head itself, tile by tile, which it has. All give
the entropy too. Each runs in a fresh process, which reports how far its peak rose above what it held before, and its
log-probs, which must agree. Prints Markdown. Needs halfmatch[dev] installed; Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from pairs import machine, one_thread
from transformers import PretrainedConfig

from halfmatch.rl.batching import Batch, collate
from halfmatch.rl.scoring import token_logprobs

WIDTH = 64
PROMPT_TOKENS = 8
SEQUENCES = 4  # rows that the batch's tokens are divided among


class HeadOnly(torch.nn.Module):
    """Logits of a token from its own embedding."""

    def __init__(self, vocabulary: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocabulary, WIDTH, dtype=dtype)
        self.config = PretrainedConfig()
        self.head = torch.nn.Linear(WIDTH, vocabulary, bias=False, dtype=dtype)

    def forward(self, input_ids: torch.Tensor, logits_to_keep: torch.Tensor | slice, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids[:, logits_to_keep])))


def plain(model: torch.nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [B, R], by `log_softmax` of all logits in float32."""
    tokens = batch.response_mask.shape[1]
    logits = model(batch.input_ids[:, :-1], slice(-tokens, None)).logits.float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
    return logprobs.gather(-1, batch.input_ids[:, -tokens:, None]).squeeze(-1), entropy


def trl_logits(model: torch.nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by TRL's functions of logits; with 16-bit logits all that it computes is in 16 bits."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    tokens = batch.response_mask.shape[1]
    logits = model(batch.input_ids[:, :-1], slice(-tokens, None)).logits / temperature
    with torch.no_grad():
        entropy = entropy_from_logits(logits)
    return selective_log_softmax(logits, batch.input_ids[:, -tokens:]), entropy


def trl_fused(model: Any, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the function that TRL puts in the place of an LM head; logits never stand as a whole."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    tokens = batch.response_mask.shape[1]
    hidden = model.embedding(batch.input_ids[:, -tokens - 1 : -1]).flatten(0, 1)
    targets = batch.input_ids[:, -tokens:].flatten()
    logp, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, model.head.weight, None, targets, temperature, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
    )
    return logp.view(-1, tokens), entropy.detach().view(-1, tokens)


WAYS: dict[str, Callable[..., Any]] = {
    "log_softmax": plain,
    "TRL, from logits": trl_logits,
    "TRL, fused": trl_fused,
    "halfmatch": token_logprobs,
}


def peak_bytes() -> int:
    """The most resident memory that this process ever had."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(way: str, dtype: str, vocabulary: int, tokens: int) -> dict[str, Any]:
    one_thread()
    model = HeadOnly(vocabulary, getattr(torch, dtype))
    ids = torch.randint(vocabulary, (SEQUENCES, PROMPT_TOKENS + tokens // SEQUENCES)).tolist()
    batch = collate([row[:PROMPT_TOKENS] for row in ids], [row[PROMPT_TOKENS:] for row in ids], stop_token_ids=())
    small = batch.select(torch.tensor([0]))
    small = Batch(small.input_ids[:, :24], small.prompt_lengths, small.response_mask[:, :16], small.truncated)
    WAYS[way](model, small, 1.0)[0].sum().backward()  # what the first call of anything allocates once
    before, start = peak_bytes(), time.process_time()
    logp, _ = WAYS[way](model, batch, 1.0)
    forward = peak_bytes()
    logp.sum().backward()
    return {
        "forward": forward - before,
        "peak": peak_bytes() - before,
        "seconds": time.process_time() - start,
        "sum": logp.double().sum().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="that of Qwen2.5 and Qwen3")
    parser.add_argument("--tokens", type=int, default=2048, help="response tokens of the batch")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.dtype, options.vocabulary, options.tokens)))
        return
    print(f"{machine()}.\n")
    print(f"{options.tokens:,} tokens, a vocabulary of {options.vocabulary:,}; GiB above what a process held before.\n")
    print("| logits | way | forward | forward and backward | ratio | in sizes of the logits | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for dtype, bytes_ in (("bfloat16", 2), ("float32", 4)):
        logits = options.vocabulary * options.tokens * bytes_
        sizes = ("--vocabulary", str(options.vocabulary), "--tokens", str(options.tokens))
        results = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--dtype", dtype, *sizes]
            results[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ours = results["halfmatch"]
        for way, result in results.items():
            if abs(result["sum"] / ours["sum"] - 1) > 1e-3:
                raise SystemExit(f"{way} gives a log-prob of {result['sum']}, halfmatch {ours['sum']}")
            print(
                f"| {dtype} | {way} | {result['forward'] / 2**30:.2f} | {result['peak'] / 2**30:.2f} "
                f"| {result['peak'] / ours['peak']:.1f} | {result['peak'] / logits:.1f} | {result['seconds']:.1f} |"
            )


if __name__ == "__main__":
    main()
