"""What the precision grid is on this machine's GPU: mismatch, gradient fidelity, time and memory of every pair.

    scripts/gpu_check.sh               a model of 283 M parameters, made on the GPU; about ten minutes
    scripts/gpu_check.sh --tiny        the same on a CPU, with a tiny model; about a minute

The model learns the laptop run's task there, twice: at a gain of the final norm that gives logits of a usual size, and
continued at eight times that gain. What the steps write goes to results/gpu-check, and a README.md with the tables and
the figures to benchmarks/gpu_check/NAME, NAME being the GPU's. Needs torch, transformers, pyarrow, matplotlib and the
other requirements of halfmatch, and neither Snakemake nor vLLM.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from precision_grid import tables

from halfmatch import __version__, jobs, models, steps
from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.paths import Paths
from halfmatch.progress import Progress
from halfmatch.report.figures import grid, mismatch, overview, style
from halfmatch.report.results import collect

LARGE = {
    "layers": 24, "hidden_size": 1024, "heads": 16, "kv_heads": 8, "intermediate_size": 2816,
    "steps": 400, "batch_size": 64, "learning_rate": 3e-4, "gain": 4,
}  # fmt: skip
TINY = {"layers": 1, "intermediate_size": 64, "steps": 20, "batch_size": 8, "thinking_tokens": (3, 6), "gain": 16}
LATER_STEPS = 4  # the continued model takes so many times fewer
HIGH_GAIN = 8
FIGURES = (overview.headline, grid.heat_maps, mismatch.fidelity)


def configuration(output: Path, *, tiny: bool, device: str) -> Config:
    """The grid of config/grid.yaml, on one task and two models."""
    first = TINY if tiny else LARGE
    later = {
        **first,
        "start": "usual-logits",
        "gain": HIGH_GAIN * first["gain"],
        "steps": first["steps"] // LATER_STEPS,
        "learning_rate": 1e-4,
    }
    both = {name: {"compute": name, "rollout": name, "emulate": "always"} for name in ("bf16", "fp16", "fp32")}
    parts = {
        f"bf16-{name}": {**both["bf16"], "fp32_modules": [part]}
        for name, part in (("lm-head", "lm_head"), ("norms", "norm"), ("between-matmuls", "between_matmuls"))
    }
    values: dict[str, Any] = {
        "output": str(output),
        "problems": {"all": {"source": "generator", "split": "all"}},
        "models": {
            "usual-logits": {"source": "bootstrap", "bootstrap": first},
            "large-logits": {"source": "bootstrap", "bootstrap": later},
        },
        "precisions": {**both, **parts},
        "engine": {"device": device, "slots": 64 if tiny else 256},
        "solvability": {"model": "usual-logits", "problems": "all"},
        "mismatch": {
            "models": ["usual-logits", "large-logits"],
            "precisions": [*both, *parts],
            "grid": [*both],
            "samples": 2 if tiny else 4,
            "sampling": {"max_tokens": 12 if tiny else 80},
            "micro_batch_tokens": 16_384,
            "gradient_fidelity": {"objectives": ["pg", "pg-token-tis", "pg-seq-is", "pg-seq-mis"]},
        },
        "training": None,
        "evaluation": None,
        "report": {"title": "The precision grid on a GPU"},
    }
    return validate(values, "gpu_check")


def run(config: Config) -> None:
    """Make the models on the device, then every step of the offline measurement."""
    paths = Paths(Path(config.output))
    for job in jobs.jobs(config, "problems"):
        steps.run("problems", config, **job)
    for name in jobs.model_names(config):
        source, start = config.models[name], jobs.start_of(config, name)
        assert source.bootstrap is not None
        with Progress(f"model {name}", source.bootstrap.steps) as progress:
            models.prepare(
                source,
                paths.of("model", model=name),
                start=paths.of("model", model=start) if start else None,
                seed=config.seed,
                progress=progress,
                device=config.engine.device,
            )
    for step in ("rollouts", "scores", "mismatch", "fidelity"):
        for job in jobs.jobs(config, step):
            steps.run(step, config, **job)


def write(config: Config, folder: Path, device_name: str) -> None:
    """The tables and figures of a finished run."""
    results, names = collect(config), list(config.mismatch.models)
    model = models.load(Paths(Path(config.output)).of("model", model=names[0]), torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"# The precision grid on {device_name}",
        "",
        f"`scripts/gpu_check.sh`, halfmatch {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}: a "
        f"Qwen3 of {parameters / 1e6:,.2g} M parameters that learned the laptop run's task, decoded by the "
        "transformers engine. Numbers in brackets are 95 % intervals over problems.",
        "",
    ]
    with style.styled():
        for draw in FIGURES:
            drawing = draw(results)
            style.write(style.render(drawing), drawing.name, folder)
            lines += [f"![{drawing.title}]({drawing.name}.png)", "", drawing.caption, ""]
    lines += tables(config, names)
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/gpu_check"), help="for tables and figures")
    parser.add_argument("--results", type=Path, default=Path("results/gpu-check"), help="for what the steps write")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine; --tiny runs the same on its CPU")
    device_name = "a CPU" if options.tiny else torch.cuda.get_device_name()
    config = configuration(
        options.results / ("tiny" if options.tiny else "large"),
        tiny=options.tiny,
        device="cpu" if options.tiny else "cuda",
    )
    run(config)
    folder = options.output / re.sub(r"[^A-Za-z0-9]+", "-", "cpu-tiny" if options.tiny else device_name)
    write(config, folder, device_name)
    print(f"\nTables and figures: {folder}")


if __name__ == "__main__":
    main()
