"""The transformers engine against `model.generate`: the same model, dtype, prompts and number of tokens.

    python benchmarks/decoding.py [--rounds 3] [--device cuda] [--dtypes fp32 bf16 fp16] [--sequences 64 256]

A random Qwen3 of 5 M parameters samples responses of unequal lengths (a token ends one with a chance of 1 in 48; 128
tokens at most) to prompts of 8 to 40 tokens, 8 responses a prompt. `generate` gets all sequences as one batch, padded
on the left, and is told where each response of the engine ended, so that both make exactly as many tokens. It gives no
log-probs, which the engine does. Prints Markdown. Needs halfmatch installed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from pairs import compare, machine, one_thread, random_model, ratio, timed
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from halfmatch import engines
from halfmatch.config import EngineSettings, Sampling
from halfmatch.engines import Completion, Request
from halfmatch.precision import DType, Precision, torch_dtype

PROMPT_TOKENS = (8, 40)
SAMPLES = 8
MAX_TOKENS = 128
STOP_SHARE = 48
SLOTS = (64, 256)


def requests(count: int, vocabulary: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for _ in range(count // SAMPLES):
        length = int(torch.randint(*PROMPT_TOKENS, (), generator=generator))
        prompts.append(tuple(torch.randint(2, vocabulary, (length,), generator=generator).tolist()))
    return [Request(prompt, seed) for seed, prompt in enumerate(prompt for prompt in prompts for _ in range(SAMPLES))]


class EndsAt(StoppingCriteria):
    """Ends the response of each row after so many tokens."""

    def __init__(self, prompt: int, lengths: list[int], device: str):
        self.ends = prompt + torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def generating(folder: Path, dtype: DType, asked: list[Request], lengths: list[int], device: str) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype)).to(device).eval()
    longest = max(len(request.prompt_ids) for request in asked)
    rows = [[0] * (longest - len(request.prompt_ids)) + list(request.prompt_ids) for request in asked]
    input_ids = torch.tensor(rows, device=device)
    ends = StoppingCriteriaList([EndsAt(longest, lengths, device)])
    settings = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "temperature": 1.0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def run() -> None:
        output = model.generate(
            input_ids, attention_mask=input_ids != 0, max_new_tokens=MAX_TOKENS, stopping_criteria=ends, **settings
        )
        assert output.shape[1] == longest + max(lengths)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16", "fp16"), default=("fp32", "bf16", "fp16"))
    parser.add_argument("--sequences", nargs="+", type=int, choices=SLOTS, default=SLOTS)
    options = parser.parse_args()
    one_thread()
    print(f"{machine(options.device)}.\n")
    print("| dtype | sequences | tokens | `generate`, tokens/s | slots | engine, tokens/s | ratio |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(Path(temporary))
        for dtype in options.dtypes:
            for count in options.sequences:
                for row in measure(folder, dtype, count, options.rounds, options.device):
                    print(row, flush=True)


def measure(folder: Path, dtype: DType, count: int, rounds: int, device: str) -> list[str]:
    vocabulary = 2048
    asked, stop = requests(count, vocabulary), range(2, 2 + vocabulary // STOP_SHARE)
    sampling = Sampling(max_tokens=MAX_TOKENS)

    def decoding(slots: int) -> Callable[[], list[Completion]]:
        engine = engines.create(
            "transformers", folder, Precision.named(dtype), EngineSettings(slots=slots, device=device)
        )
        return lambda: engine.generate(asked, sampling, stop_token_ids=stop)

    runs = {slots: decoding(slots) for slots in SLOTS if slots <= count}
    lengths = [len(completion.token_ids) for completion in runs[SLOTS[0]]()]
    variants = {"generate": generating(folder, dtype, asked, lengths, device), **runs}
    watched = {name: timed(run, device) for name, run in variants.items()}
    timings = compare(watched, rounds=rounds, warm_up=0 if device == "cpu" else 1, device=device)
    tokens, plain = sum(lengths), timings["generate"]
    return [
        f"| {dtype} | {count} | {tokens:,} | {tokens / plain.median:,.0f} | {slots} "
        f"| {tokens / timings[slots].median:,.0f} | {ratio(plain, timings[slots]):.2f} |"
        for slots in runs
    ]


if __name__ == "__main__":
    main()
