"""What the benchmarks of speed share: variants that are timed in turn, and random models to time them on.

The machine may be shared and its clock may change, so a variant is never timed by itself: every round runs all of them,
one after another, and what is reported is the median over rounds, of the seconds and of the ratio within a round. CPU
time is that of this process, whose one thread does all the work on a CPU; on a GPU the wall time counts.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from halfmatch.precision.emulation import cpu_units


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant in every round."""

    cpu: list[float]
    wall: list[float]

    def seconds(self, device: str = "cpu") -> list[float]:
        """Those to look at: of the processor where it does the work."""
        return self.cpu if device == "cpu" else self.wall

    def median(self, device: str = "cpu") -> float:
        return statistics.median(self.seconds(device))


def compare(
    variants: Mapping[str, Callable[[], object]], *, rounds: int, device: str = "cpu", warm_up: bool = True
) -> dict[str, Timing]:
    """Run every variant in every round, in turn, after a round that does not count."""
    timings = {name: Timing([], []) for name in variants}
    for number in range(rounds + warm_up):
        for name, run in variants.items():
            _synchronise(device)
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            _synchronise(device)
            if number >= warm_up:
                timings[name].cpu.append(time.process_time() - cpu)
                timings[name].wall.append(time.perf_counter() - wall)
    return timings


def ratio(slow: Timing, fast: Timing, device: str = "cpu") -> float:
    """How many times as long `slow` took as `fast`: the median over rounds."""
    pairs = zip(slow.seconds(device), fast.seconds(device), strict=True)
    return statistics.median(one / other for one, other in pairs)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


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
    units = ", ".join(sorted(cpu_units())) or "none"
    return f"{name}, one thread, torch's kernels for {torch.backends.cpu.get_cpu_capability()}, 16-bit units: {units}; {software}"


def random_model(folder: Path, **changes: int) -> Path:
    """Write a randomly initialised Qwen3 of 5.0 M parameters, unless told otherwise, without a tokenizer."""
    shape = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(**{**shape, **changes}, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    )
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    return folder
