"""RL in bf16 and in fp16 for real, on one GPU: config/gpu_sanity.yaml from its models to its trained ones.

    scripts/gpu_sanity.sh                                 about ten minutes on an H200-class GPU
    scripts/gpu_sanity.sh config/gpu_sanity-cpu.yaml      the same with a tiny model on a CPU, in a minute

Runs the steps one after another in this process, then measures tokens a second and peak memory of decoding and of
training in both dtypes, in turn. Prints Markdown, and on a GPU writes it to benchmarks/gpu_sanity-NAME.md, NAME being
the GPU's. A run that was stopped goes on where it was; remove its results to start anew. Needs torch, transformers,
pyarrow and the other requirements of halfmatch, not Snakemake.
"""

from __future__ import annotations

import argparse
import csv
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median

import torch
from pairs import compare, machine, one_thread, ratio, timed

from halfmatch import artifacts, engines, jobs, models, steps
from halfmatch.config import Config
from halfmatch.config_files import load
from halfmatch.engines import Request
from halfmatch.paths import Paths
from halfmatch.precision import torch_dtype
from halfmatch.precision.casting import cast_model
from halfmatch.precision.masters import MasterWeights
from halfmatch.report.numbers import number, with_interval
from halfmatch.report.results import estimate
from halfmatch.rl.batching import collate
from halfmatch.rl.scoring import token_logprobs

REPOSITORY = Path(__file__).parents[1]
CONFIG = REPOSITORY / "config/gpu_sanity.yaml"
STEPS = ("problems", "model", "solvability", "perfectible", "rollouts", "scores", "mismatch", "train")
ROUNDS = 3
ENDS = 5  # iterations at each end of a run whose mean reward is shown


def run(config: Config) -> dict[str, float]:
    """Every step that has not been run; the seconds of each."""
    paths, seconds = Paths(Path(config.output)), {}
    result = {"solvability": "shard", "train": "trained"}
    for step in STEPS:
        start = time.perf_counter()
        for job in _in_order(config, step):
            if not paths.of(result.get(step, step), **job).exists():
                steps.run(step, config, **job)
        seconds[step] = time.perf_counter() - start
    return seconds


def _in_order(config: Config, step: str) -> list[dict[str, str]]:
    """A step's jobs, models behind those that they start from."""
    found = list(jobs.jobs(config, step))
    if step == "model":
        found.sort(key=lambda job: jobs.start_of(config, job["model"]) is not None)
    return found


def mismatches(config: Config) -> Iterator[str]:
    yield "| dtype of both sides | k3 (nats a token) | σ | ESS/N |\n|---|---|---|---|"
    for job in jobs.jobs(config, "mismatch"):
        metrics = artifacts.read_json(Paths(Path(config.output)).of("mismatch", **job))["metrics"]
        cells = (with_interval(estimate(metrics[name]), 2) for name in ("k3", "sigma", "ess_share"))
        yield f"| {job['train']} | {' | '.join(cells)} |"


def trained(config: Config) -> Iterator[str]:
    """Rewards, mismatch and seconds of each run."""
    yield (
        f"| run | reward, first {ENDS} iterations | last {ENDS} | k3, first | last | skipped steps | s an iteration: "
        "rollout | grading | scoring | training | sync |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    paths = Paths(Path(config.output))
    for cell in jobs.runs(config):
        log = artifacts.read(paths.of("training_log", run=cell.name), "training_log").to_pylist()
        first = [row for row in log if row["iteration"] < ENDS]
        last = [row for row in log if row["iteration"] > log[-1]["iteration"] - ENDS]
        with open(paths.of("checkpoints", run=cell.name) / "seconds.csv", encoding="utf-8") as file:
            seconds = list(csv.DictReader(file))
        cells = [
            *(number(mean(row["reward"] for row in rows), 2) for rows in (first, last)),
            *(number(mean(row["k3"] for row in rows if row["k3"] is not None), 2) for rows in (first, last)),
            str(sum(row["step_skipped"] for row in log)),
            *(
                f"{median(float(row[phase]) for row in seconds):.2f}"
                for phase in ("rollout", "grading", "scoring", "training", "sync")
            ),
        ]
        yield f"| {cell.name} | {' | '.join(cells)} |"


# ---------------------------------------------------------------------------------------------------- speed and memory
def decoding(config: Config, folder: Path, precision: str) -> Callable[[], None]:
    """Responses of an iteration, none of which ends early."""
    assert config.training is not None
    engine = engines.create("transformers", folder, config.precisions[precision], config.engine)
    requests = [Request((2, 3, 12, 4, 5), seed) for seed in range(_responses(config))]

    def decode() -> None:
        engine.generate(requests, config.training.sampling, stop_token_ids=())

    return decode


def training(config: Config, folder: Path, precision: str) -> Callable[[], None]:
    """A forward and backward pass of as many tokens, and an optimizer step."""
    assert config.training is not None
    dtypes, sampling = config.precisions[precision], config.training.sampling
    model = models.load(folder, torch.float32).to(config.engine.device)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    cast_model(model, dtypes.compute, dtypes.fp32_modules, dtypes.emulate)
    masters = MasterWeights(model.requires_grad_(True), weights, torch_dtype(dtypes.reduce))
    optimizer = torch.optim.AdamW(masters.parameters.values(), lr=1e-6, fused=True)
    count, rows = _responses(config), max(1, config.training.micro_batch_tokens // (sampling.max_tokens + 5))
    tokens = torch.randint(2, 12, (count, sampling.max_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [
        collate([[2, 3, 12, 4, 5]] * len(part), part, stop_token_ids=()).to(config.engine.device)
        for part in (tokens[start : start + rows] for start in range(0, count, rows))
    ]

    def step() -> None:
        for batch in batches:
            token_logprobs(model, batch)[0].sum().backward()
        optimizer.step()
        masters.round_into_model()
        masters.clear_gradients()

    return step


def _responses(config: Config) -> int:
    assert config.training is not None
    return config.training.prompts_per_iteration * config.training.samples_per_prompt


def speed(config: Config) -> Iterator[str]:
    """Tokens a second of decoding and training, and their peak memory, the dtypes in turn."""
    assert config.training is not None
    device = config.engine.device
    folder = Paths(Path(config.output)).of("model", model=config.solvability.model)
    tokens = _responses(config) * config.training.sampling.max_tokens
    yield "| | dtype | tokens/s | times the first's | peak GiB |\n|---|---|---|---|---|"
    for kind in (decoding, training):
        runs = {name: kind(config, folder, name) for name in config.training.precisions}
        timings = compare({name: timed(run, device) for name, run in runs.items()}, rounds=ROUNDS, device=device)
        first = next(iter(timings.values()))
        for name, timing in timings.items():
            yield (
                f"| {kind.__name__} | {name} | {tokens / timing.median:,.0f} | {ratio(first, timing):.3f} "
                f"| {_peak(lambda run=kind, name=name: run(config, folder, name)(), device)} |"
            )


def _peak(run: Callable[[], None], device: str) -> str:
    """GPU memory that a run allocates at most, from the loading of its model on, beyond what is held already."""
    if device != "cuda":
        return "–"
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f}"


def report(config: Config, seconds: dict[str, float]) -> Iterator[str]:
    folder = Paths(Path(config.output)).of("model", model=config.solvability.model)
    parameters = sum(weight.numel() for weight in models.load(folder, torch.float32).parameters())
    spent = ", ".join(f"{step} {value:.0f}" for step, value in seconds.items())
    yield f"# RL in bf16 and fp16 on {machine(config.engine.device).split(',')[0]}\n"
    yield f"`scripts/gpu_sanity.sh`, {machine(config.engine.device)}: a Qwen3 of {parameters / 1e6:.2g} M parameters."
    yield f"Seconds: {spent}; {sum(seconds.values()):.0f} together. A step that was done before has none.\n"
    for part in (mismatches, trained, speed):
        yield from part(config)
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=Path, help="configuration files over config/gpu_sanity.yaml")
    options = parser.parse_args()
    config = load([CONFIG, *options.layers])
    if config.engine.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine; add config/gpu_sanity-cpu.yaml for a tiny run on its CPU")
    one_thread()
    text = "\n".join(report(config, run(config)))
    print(text)
    if config.engine.device == "cuda":
        name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
        (REPOSITORY / f"benchmarks/gpu_sanity-{name}.md").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
