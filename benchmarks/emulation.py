"""16-bit Linear layers on a CPU: emulated ones against PyTorch's native 16-bit kernels, forward and backward.

    python benchmarks/emulation.py [--rounds 5]
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/emulation.py      as on a CPU with AVX2 alone

The layers as the trainer and the engine use them: forward without gradients (the engine decodes so; the upcast weight
of an emulated layer is kept), and forward with backward (the trainer). Sizes are those of a small model's layers by the
rows of a decoding step and of a micro-batch. Prints Markdown. Needs halfmatch installed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from pairs import Timing, compare, machine, one_thread, ratio, timed

from halfmatch.precision import torch_dtype
from halfmatch.precision.emulation import EmulatedLinear, is_emulated

SHAPES = (  # rows, in, out
    (8, 256, 1024),
    (64, 256, 1024),
    (64, 2048, 2048),
    (2048, 64, 176),
    (2048, 256, 1024),
    (1024, 896, 4864),
)
OPERATIONS = 4e8  # that a timing takes at least


def forward(layer: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        layer(x)


def forward_backward(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    layer(x).backward(dy)
    x.grad = layer.weight.grad = None


def repeated(run: Callable[[], None], operations: float) -> Callable[[], None]:
    times = max(1, round(OPERATIONS / operations))
    return lambda: [run() for _ in range(times)] and None


def row(dtype: str, shape: tuple[int, int, int], rounds: int) -> str:
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    native = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch_dtype(dtype))
    emulated = EmulatedLinear(native)
    x, dy = torch.randn(rows, inputs).to(native.weight.dtype), torch.randn(rows, outputs).to(native.weight.dtype)
    operations = 2.0 * rows * inputs * outputs
    cells = []
    for kind, share in (("forward", 1), ("both", 3)):
        native.weight.requires_grad_(kind == "both")
        leaf = x.clone().requires_grad_(kind == "both")
        runs = {
            name: repeated(
                (lambda layer=layer: forward(layer, leaf))
                if kind == "forward"
                else (lambda layer=layer: forward_backward(layer, leaf, dy)),
                share * operations,
            )
            for name, layer in (("native", native), ("emulated", emulated))
        }
        timings = compare({name: timed(run) for name, run in runs.items()}, rounds=rounds)
        times = max(1, round(OPERATIONS / (share * operations)))

        def speed(timing: Timing, done: float = times * share * operations) -> str:
            return f"{done / timing.median / 1e9:.0f}"

        cells += [*(speed(timing) for timing in timings.values()), f"{ratio(timings['native'], timings['emulated']):.1f}"]
    auto = "emulated" if is_emulated(dtype, "auto", "cpu") else "native"
    return f"| {dtype} | {auto} | {rows} × {inputs} → {outputs} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    one_thread()
    held = [f"{name}={os.environ[name]}" for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA") if name in os.environ]
    print(f"{machine()}{', with ' + ' '.join(held) if held else ''}. GFLOP/s of CPU time.\n")
    print("| dtype | `auto` takes | rows × in → out | forward, native | emulated | ratio | with backward, native | emulated | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype in ("fp16", "bf16"):
        for shape in SHAPES:
            print(row(dtype, shape, options.rounds), flush=True)


if __name__ == "__main__":
    main()
