"""What the benchmarks of speed share: variants that are timed in turn, and random models to time them on.

The machine may be shared and its clock may change, so a variant is never timed by itself: every round runs all of them,
one after another, and what is reported is the median over rounds, of the seconds and of the ratio within a round. On a
CPU the seconds are of the processor, for this process, whose one thread does all the work; on a GPU of the clock.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PretrainedConfig, Qwen3Config

from halfmatch.precision.emulation import cpu_units


class Stopwatch:
    """Seconds since it was made: of the processor and of the clock."""

    def __init__(self, device: str = "cpu"):
        self._device = device
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        cpu, clock = self._now()
        return cpu - self._start[0], clock - self._start[1]


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant in every round."""

    device: str
    rounds: list[tuple[float, float]] = field(default_factory=list)  # of the processor, of the clock

    @property
    def seconds(self) -> list[float]:
        """Those that count."""
        return [cpu if self.device == "cpu" else clock for cpu, clock in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def clock(self) -> float:
        return statistics.median(clock for _, clock in self.rounds)


# Runs a variant; returns seconds of the processor and of the clock.
Run = Callable[[], tuple[float, float]]


def timed(run: Callable[[], object], device: str = "cpu") -> Run:
    def watched() -> tuple[float, float]:
        watch = Stopwatch(device)
        run()
        return watch.read()

    return watched


def compare(variants: Mapping[str, Run], *, rounds: int, warm_up: int = 1, device: str = "cpu") -> dict[str, Timing]:
    """Run every variant in every round, in turn, after `warm_up` rounds that do not count."""
    timings = {name: Timing(device) for name in variants}
    for number in range(warm_up + rounds):
        for name, run in variants.items():
            seconds = run()
            if number >= warm_up:
                timings[name].rounds.append(seconds)
    return timings


def ratio(slow: Timing, fast: Timing) -> float:
    """How many times as long `slow` took as `fast`: the median over rounds."""
    return statistics.median(one / other for one, other in zip(slow.seconds, fast.seconds, strict=True))


def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def machine(device: str = "cpu") -> str:
    """What the numbers were measured on, and with."""
    software = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, {software}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")
    units, kernels = ", ".join(sorted(cpu_units())) or "none", torch.backends.cpu.get_cpu_capability()
    return f"{name} (16-bit units: {units}), one thread, torch's kernels for {kernels}, {software}"


def random_model(folder: Path, config: PretrainedConfig | None = None) -> Path:
    """Write a randomly initialised Qwen3 without a tokenizer, of 5 M parameters unless told otherwise."""
    torch.manual_seed(0)
    config = config or Qwen3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    return folder
