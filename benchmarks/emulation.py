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
from pairs import compare, machine, one_thread, ratio, timed

from halfmatch.precision import DType, torch_dtype
from halfmatch.precision.emulation import EmulatedLinear, is_emulated

SHAPES = (  # rows, in, out
    (8, 256, 1024),
    (64, 256, 1024),
    (64, 2048, 2048),
    (2048, 64, 176),
    (2048, 256, 1024),
    (1024, 896, 4864),
)
ISA_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
OPERATIONS = 4e8  # that a timing takes at least


def forward(layer: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    layer.requires_grad_(False)

    @torch.inference_mode()
    def run() -> None:
        layer(x)

    return run


def forward_backward(layer: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    layer.requires_grad_(True)
    leaf, dy = x.clone().requires_grad_(), torch.randn(*x.shape[:-1], layer.out_features).to(x.dtype)

    def run() -> None:
        layer(leaf).backward(dy)
        leaf.grad = layer.weight.grad = None

    return run


def repeated(run: Callable[[], None], times: int) -> Callable[[], None]:
    def many() -> None:
        for _ in range(times):
            run()

    return many


def row(dtype: DType, shape: tuple[int, int, int], rounds: int) -> str:
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    native = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch_dtype(dtype))
    layers = {"native": native, "emulated": EmulatedLinear(native)}
    x = torch.randn(rows, inputs).to(native.weight.dtype)
    cells = []
    for kind, matmuls in ((forward, 1), (forward_backward, 3)):
        operations = 2.0 * matmuls * rows * inputs * outputs
        times = max(1, round(OPERATIONS / operations))
        runs = {name: timed(repeated(kind(layer, x), times)) for name, layer in layers.items()}
        timings = compare(runs, rounds=rounds)
        cells += [f"{times * operations / timing.median / 1e9:.0f}" for timing in timings.values()]
        cells.append(f"{ratio(timings['native'], timings['emulated']):.1f}")
    auto = "emulated" if is_emulated(dtype, "auto", "cpu") else "native"
    return f"| {dtype} | {auto} | {rows} × {inputs} → {outputs} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    one_thread()
    held = [f", {name}={os.environ[name]}" for name in ISA_LIMITS if name in os.environ]
    print(f"{machine()}{''.join(held)}. GFLOP/s of CPU time.\n")
    print(
        "| dtype | `auto` takes | rows × in → out | forward: native | emulated | ratio "
        "| with backward: native | emulated | ratio |\n|---|---|---|---|---|---|---|---|---|"
    )
    for dtype in ("fp16", "bf16"):
        for shape in SHAPES:
            print(row(dtype, shape, options.rounds), flush=True)


if __name__ == "__main__":
    main()
