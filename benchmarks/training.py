"""Training tokens a second of this trainer against TRL's GRPOTrainer: the same model, tokens, rewards and dtype.

    python benchmarks/training.py [--rounds 3] [--device cuda]

Both are handed the same completions, so nothing is sampled. An iteration is 32 responses (4 prompts × 8 samples, 128
tokens at most), the log-probs of the policy that sampled them, and 4 gradient steps of 8 responses each, with GRPO's
clipped ratio, no KL, AdamW and clipping. Both keep fp32 weights for the optimizer and compute in the dtype given, TRL
by autocast. What differs is written in training.md. On a GPU the model is a random Qwen2 of 0.5 B parameters, responses
have 2,048 tokens at most, and peak memory is reported. Prints Markdown. Needs halfmatch[dev] installed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pairs import Run, Stopwatch, Timing, compare, machine, one_thread, random_model, ratio
from transformers import Qwen2Config

from halfmatch import models
from halfmatch.config import Sampling, Training
from halfmatch.engines import Completion, Request
from halfmatch.grading import Verdict
from halfmatch.precision import DType, Precision
from halfmatch.rl.objectives import OBJECTIVES
from halfmatch.rl.rollouts import Problem
from halfmatch.rl.trainer import Trainer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

PROMPTS, SAMPLES, STEPS = 4, 8, 4
ITERATIONS = 1  # that are timed, after one that is not
LEARNING_RATE = 1e-5
STOP = 1

GPU_MODEL = Qwen2Config(  # Qwen2.5-0.5B's
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=STOP,
    pad_token_id=0,
)


@dataclass(frozen=True)
class Work:
    """What both trainers are given."""

    folder: Path
    vocabulary: int
    prompts: list[list[int]]
    responses: list[list[int]]  # SAMPLES a prompt, side by side
    max_tokens: int
    micro_batch_tokens: int
    device: str

    @property
    def tokens(self) -> int:
        """Of prompts and responses that an iteration trains on."""
        return sum(map(len, self.responses)) + SAMPLES * sum(map(len, self.prompts))


def make_work(folder: Path, device: str, equal: bool) -> Work:
    gpu = device == "cuda"
    random_model(folder, GPU_MODEL if gpu else None)
    vocabulary, longest = (GPU_MODEL.vocab_size, 2048) if gpu else (2048, 128)
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, vocabulary, (count,), generator=generator).tolist()

    lengths = torch.randint(longest // 8, longest + 1, (PROMPTS * SAMPLES,), generator=generator).tolist()
    return Work(
        folder=folder,
        vocabulary=vocabulary,
        prompts=[tokens(int(torch.randint(8, 41, (), generator=generator))) for _ in range(PROMPTS)],
        responses=[[*tokens((longest if equal else length) - 1), STOP] for length in lengths],
        max_tokens=longest,
        micro_batch_tokens=16_384 if gpu else 512,
        device=device,
    )


def reward(token_ids: list[int]) -> float:
    return float(token_ids[0] % 2)


class Recorded:
    """An engine that samples what was recorded."""

    def __init__(self, work: Work, dtype: DType):
        self.dtype, self._work = dtype, work

    def generate(self, requests: list[Request], *_: object, **__: object) -> list[Completion]:
        position = {tuple(prompt): SAMPLES * number for number, prompt in enumerate(self._work.prompts)}
        completions = []
        for request in requests:
            token_ids = self._work.responses[position[request.prompt_ids]]
            position[request.prompt_ids] += 1
            completions.append(Completion(token_ids, [-7.0] * len(token_ids), "stop"))
        return completions

    def load_weights(self, weights: object) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


def by_halfmatch(work: Work, dtype: DType) -> tuple[float, float]:
    rewards = {" ".join(map(str, ids)): reward(ids) for ids in work.responses}
    verdicts = {1.0: Verdict("correct", ""), 0.0: Verdict("wrong", "")}
    grader: Any = SimpleNamespace(grade_many=lambda tasks: [verdicts[rewards[text]] for text, _, _ in tasks])
    trainer = Trainer(
        models.load(work.folder, torch.float32).to(work.device),
        engine=Recorded(work, dtype),
        grader=grader,
        decode=lambda ids: " ".join(map(str, ids)),
        stop_token_ids=[STOP],
        problems=[Problem(str(number), "", tuple(prompt)) for number, prompt in enumerate(work.prompts)],
        settings=Training(
            prompts_per_iteration=PROMPTS,
            samples_per_prompt=SAMPLES,
            gradient_steps=STEPS,
            sampling=Sampling(max_tokens=work.max_tokens),
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
            micro_batch_tokens=work.micro_batch_tokens,
            probe=False,  # there is no engine that could serve other weights
        ),
        precision=Precision.named(dtype),
        objective=OBJECTIVES["grpo"],
        seed=0,
    )
    watch = Stopwatch(work.device)
    for number in range(1 + ITERATIONS):
        if number == 1:
            watch = Stopwatch(work.device)
        trainer.rows.extend(trainer.iteration())
    return watch.read()


def by_trl(work: Work, dtype: DType) -> tuple[float, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        watch = seconds = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == STEPS:
                self.watch = Stopwatch(work.device)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == STEPS * (1 + ITERATIONS):
                self.seconds = self.watch.read()

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        seen = dict.fromkeys(prompts, 0)
        ids = []
        for prompt in prompts:
            ids.append(work.responses[SAMPLES * int(prompt) + seen[prompt]])
            seen[prompt] += 1
        return {
            "prompt_ids": [work.prompts[int(prompt)] for prompt in prompts],
            "completion_ids": ids,
            "logprobs": None,
        }

    watch, batch = Watch(), PROMPTS * SAMPLES // STEPS
    with tempfile.TemporaryDirectory() as temporary:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32),
            reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
            args=GRPOConfig(
                output_dir=temporary,
                use_cpu=work.device == "cpu",
                bf16=dtype == "bf16",
                fp16=dtype == "fp16",
                gradient_checkpointing=False,
                per_device_train_batch_size=batch,
                steps_per_generation=STEPS,
                num_generations=SAMPLES,
                max_completion_length=work.max_tokens,
                max_steps=STEPS * (1 + ITERATIONS),
                loss_type="dr_grpo",
                scale_rewards="none",
                beta=0.0,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                optim="adamw_torch_fused",
                max_grad_norm=1.0,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(PROMPTS)]}),
            processing_class=tokenizer(work.vocabulary),
            rollout_func=rollouts,
            callbacks=[watch],
        )
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints a line a step
            trainer.train()
    assert watch.seconds is not None
    return watch.seconds


def tokenizer(vocabulary: int) -> Any:
    """One that TRL can decode with; a token is its number."""
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(kinds.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def with_memory(run: Run, device: str, peaks: list[int]) -> Run:
    """Notes the most GPU memory that was allocated."""

    def noting() -> tuple[float, float]:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = run()
        peaks.append(torch.cuda.max_memory_allocated() if device == "cuda" else 0)
        return seconds

    return noting


def row(name: str, dtype: str, work: Work, timing: Timing, peak: int, times: float | None) -> str:
    rate = ITERATIONS * work.tokens / timing.median
    memory = f" {peak / 2**30:.1f} |" if work.device == "cuda" else ""
    comparison = "" if times is None else f"{times:.2f}"
    return f"| {dtype} | {name} | {rate:,.0f} | {timing.clock / ITERATIONS:.2f} |{memory} {comparison} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    one_thread()
    import trl

    device, memory = options.device, " peak GiB |" if options.device == "cuda" else ""
    print(f"{machine(device)}, TRL {trl.__version__}.\n")
    for equal in (False, True):
        with tempfile.TemporaryDirectory() as temporary:
            work = make_work(Path(temporary), device, equal)
            kind = "all as long" if equal else "of unequal lengths"
            print(f"\n{PROMPTS * SAMPLES} responses {kind}, {work.tokens:,} tokens an iteration:\n")
            print(f"| dtype | trainer | tokens/s | s of the clock an iteration |{memory} ratio |")
            print("|---|---|---|---|---|" + ("---|" if memory else ""))
            for dtype in ("fp32", "bf16", "fp16"):
                report(work, dtype, options.rounds)


def report(work: Work, dtype: DType, rounds: int) -> None:
    peaks: dict[str, list[int]] = {"TRL": [], "halfmatch": []}
    runs = {"TRL": lambda: by_trl(work, dtype), "halfmatch": lambda: by_halfmatch(work, dtype)}
    if dtype == "fp16" and work.device == "cpu":
        del runs["TRL"]  # accelerate refuses fp16 on a CPU
    noting = {name: with_memory(run, work.device, peaks[name]) for name, run in runs.items()}
    timings = compare(noting, rounds=rounds, warm_up=0, device=work.device)
    for name, timing in timings.items():
        times = ratio(timings["TRL"], timing) if "TRL" in timings and name != "TRL" else None
        print(row(name, dtype, work, timing, max(peaks[name]), times), flush=True)


if __name__ == "__main__":
    main()
