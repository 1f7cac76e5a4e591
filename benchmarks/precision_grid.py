"""The precision grid with its cost: what a finished run of config/grid.yaml measured, beside the seconds that each
precision takes.

    snakemake --configfile config/grid.yaml
    python benchmarks/precision_grid.py [--config config/grid.yaml] [--model gain320]

Timings are no artefacts, so the pipeline keeps none; they are measured here, in one process and one thread: decoding of
a batch and a forward and backward pass of the same tokens, in every precision in turn and several times over, as the
smallest CPU time (on a GPU: wall time). On a CPU without 16-bit units a 16-bit matmul is an emulated one: what it costs
there says nothing of a GPU. Prints Markdown. Needs halfmatch installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from halfmatch import artifacts, engines, jobs, models
from halfmatch.config import Config, Sampling
from halfmatch.config_files import load
from halfmatch.engines import Request
from halfmatch.paths import Paths
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model
from halfmatch.report.numbers import number, with_interval
from halfmatch.report.results import estimate
from halfmatch.rl.batching import collate
from halfmatch.rl.scoring import token_logprobs

RESPONSES = 64
TOKENS = 64
ROUNDS = 5
LAST_ITERATIONS = 5


def decoding(config: Config, folder: Path, precision: Precision) -> Callable[[], None]:
    engine = engines.create("transformers", folder, precision, config.engine)
    requests = [Request((2, 3), seed) for seed in range(RESPONSES)]
    sampling = Sampling(max_tokens=TOKENS)

    def run() -> None:
        engine.generate(requests, sampling, stop_token_ids=())

    return run


def training(config: Config, folder: Path, precision: Precision) -> Callable[[], None]:
    model = models.load(folder, torch.float32).to(config.engine.device)
    cast_model(model, precision.compute, precision.fp32_modules, precision.emulate)
    model.requires_grad_(True)
    tokens = np.random.default_rng(0).integers(2, 12, (RESPONSES, TOKENS)).tolist()
    batch = collate([[2, 3]] * RESPONSES, tokens, stop_token_ids=()).to(config.engine.device)

    def run() -> None:
        token_logprobs(model, batch)[0].sum().backward()
        model.zero_grad()

    return run


def seconds(config: Config, folder: Path) -> dict[str, tuple[float, float]]:
    """Of decoding and of training a batch, by precision: the smallest of ROUNDS, after one to warm up."""
    torch.set_num_threads(1)
    clock = time.process_time if config.engine.device == "cpu" else _synchronised
    runs = {
        name: (decoding(config, folder, precision), training(config, folder, precision))
        for name, precision in config.precisions.items()
        if precision.compute == precision.rollout
    }
    best = {name: [np.inf, np.inf] for name in runs}
    for number_ in range(ROUNDS + 1):
        for name, pair in runs.items():
            for kind, run in enumerate(pair):
                start = clock()
                run()
                if number_:
                    best[name][kind] = min(best[name][kind], clock() - start)
    return {name: (pair[0], pair[1]) for name, pair in best.items()}


def _synchronised() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def offline(config: Config, model: str, cost: dict[str, tuple[float, float]]) -> Iterator[str]:
    paths, fp32 = Paths(Path(config.output)), cost["fp32"]
    objectives = config.mismatch.gradient_fidelity.objectives
    yield (
        f"| engine | trainer | k3 (nats a token) | ESS/N | {' | '.join(f'cosine, {name}' for name in objectives)} "
        "| decoding | training |"
    )
    yield f"|{'---|' * (6 + len(objectives))}"
    for job in jobs.jobs(config, "mismatch"):
        if job["model"] != model:
            continue
        metrics = artifacts.read_json(paths.of("mismatch", **job))["metrics"]
        fidelity = artifacts.read_json(paths.of("fidelity", **job))["objectives"]
        numbers = [
            *(with_interval(estimate(metrics[name]), 2) for name in ("k3", "ess_share")),
            *(with_interval(estimate(fidelity[name]["cosine"]), 2) for name in objectives),
            number(cost[job["rollout"]][0] / fp32[0], 2),
            number(cost[job["train"]][1] / fp32[1], 2),
        ]
        yield f"| {job['rollout']} | {job['train']} | {' | '.join(numbers)} |"


def trained(config: Config) -> Iterator[str]:
    assert config.training is not None
    paths, last = Paths(Path(config.output)), LAST_ITERATIONS
    yield f"| precision (trainer-engine) | objective | reward, last {last} iterations, by seed | k3 at the start |"
    yield "|---|---|---|---|"
    for name in config.training.precisions:
        for objective in config.training.objectives:
            logs = [
                artifacts.read(paths.of("training_log", run=run.name), "training_log").to_pandas()
                for run in jobs.runs(config)
                if (run.precision, run.objective) == (name, objective)
            ]
            rewards = [log[log["iteration"] > log["iteration"].max() - last]["reward"].mean() for log in logs]
            start = np.mean([log[log["iteration"] < last]["k3"].mean() for log in logs])
            words = ", ".join(number(reward, 2) for reward in rewards)
            yield f"| {name} | {objective} | {words} | {number(float(start), 2)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", type=Path, default=[Path("config/grid.yaml")])
    parser.add_argument("--model", default="gain320", help="model whose numbers are shown")
    options = parser.parse_args()
    config = load(options.config)
    cost = seconds(config, Paths(Path(config.output)).of("model", model=options.model))
    per_token = 1e6 / (RESPONSES * TOKENS)
    print(
        f"Cost relative to fp32: decoding {cost['fp32'][0] * per_token:.0f} µs a token, forward and backward pass "
        f"{cost['fp32'][1] * per_token:.0f} µs a token.\n"
    )
    print(*offline(config, options.model, cost), sep="\n")
    if config.training:
        print("", *trained(config), sep="\n")


if __name__ == "__main__":
    main()
