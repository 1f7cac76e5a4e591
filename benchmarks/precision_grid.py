"""The precision grid with its cost: what a finished run of config/grid.yaml measured, beside the time and the memory
that each precision takes.

    snakemake --configfile config/grid.yaml
    python benchmarks/precision_grid.py [--config config/grid.yaml] [--models gain16 gain320]

Timings are no artefacts, so the pipeline keeps none; they are measured here, in one process and one thread: decoding of
a batch and a forward and backward pass of the same tokens, in every precision in turn and several times over, as CPU
time (on a GPU: wall time). On a CPU without 16-bit units a 16-bit matmul is an emulated one: what it costs there says
nothing of a GPU. Memory is counted and not sampled: the weights that the engine holds, and what the training pass keeps
for its backward pass. What is not counted has an interval; the text says over what. Prints Markdown. Needs halfmatch
installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from pairs import Timing, compare, one_thread, timed

from halfmatch import artifacts, engines, jobs, models
from halfmatch.config import Config, Sampling
from halfmatch.config_files import load
from halfmatch.engines import Request
from halfmatch.paths import Paths
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model
from halfmatch.report import training
from halfmatch.report.numbers import number, percent, with_interval
from halfmatch.report.results import estimate
from halfmatch.rl.batching import collate
from halfmatch.rl.scoring import token_logprobs
from halfmatch.statistics import Estimate, t_interval

RESPONSES = 64
TOKENS = 64
ROUNDS = 5
ITERATIONS = 5  # at the start and at the end of a training
MEGABYTE = 1e6


@dataclass(frozen=True)
class Cost:
    """Of decoding a batch of RESPONSES × TOKENS tokens, and of a forward and backward pass over it."""

    decoding: Timing
    training: Timing
    weights_bytes: int  # that the engine holds
    kept_bytes: int  # for the backward pass, without the weights


class _Bench:
    """Both sides of one precision, ready to run again and again."""

    def __init__(self, config: Config, folder: Path, precision: Precision):
        self._engine = engines.create("transformers", folder, precision, config.engine)
        self._requests = [Request((2, 3), seed) for seed in range(RESPONSES)]
        self.model = models.load(folder, torch.float32).to(config.engine.device)
        cast_model(self.model, precision.compute, precision.fp32_modules, precision.emulate)
        self.model.requires_grad_(True)
        tokens = np.random.default_rng(0).integers(2, 12, (RESPONSES, TOKENS)).tolist()
        self._batch = collate([[2, 3]] * RESPONSES, tokens, stop_token_ids=()).to(config.engine.device)

    def decode(self) -> None:
        self._engine.generate(self._requests, Sampling(max_tokens=TOKENS), stop_token_ids=())

    def train(self) -> None:
        token_logprobs(self.model, self._batch)[0].sum().backward()
        self.model.zero_grad()

    def weights_bytes(self) -> int:
        """Of a model that holds what the engine holds: both sides of these precisions round alike."""
        return sum(_storages(self.model.parameters()).values())

    def kept_bytes(self) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.update(_storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = token_logprobs(self.model, self._batch)[0].sum()
        weights = _storages(self.model.parameters())
        del total
        return sum(size for place, size in kept.items() if place not in weights)


def _storages(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> dict[int, int]:
    """Bytes of the memory behind tensors, by where it lies; what two of them share is there once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def costs(config: Config, folder: Path) -> dict[str, Cost]:
    """By precision that is the same on both sides; times of ROUNDS rounds."""
    one_thread()
    device = config.engine.device
    benches = {
        name: _Bench(config, folder, precision)
        for name, precision in config.precisions.items()
        if precision.compute == precision.rollout
    }
    timings = compare(
        {
            f"{kind} {name}": timed(run, device)
            for name, bench in benches.items()
            for kind, run in (("decoding", bench.decode), ("training", bench.train))
        },
        rounds=ROUNDS,
        device=device,
    )
    return {
        name: Cost(timings[f"decoding {name}"], timings[f"training {name}"], bench.weights_bytes(), bench.kept_bytes())
        for name, bench in benches.items()
    }


def mean(values: ArrayLike, confidence: float) -> Estimate:
    """With Student's interval."""
    return Estimate(float(np.mean(values)), *t_interval(values, confidence))


def share(timing: Timing, of: Timing, confidence: float) -> Estimate:
    """The time of one as a share of another's: the geometric mean over rounds, in each of which both ran."""
    return Estimate(*np.exp(mean(np.log(np.divide(timing.seconds, of.seconds)), confidence)).tolist())


def offline(config: Config, model: str, cost: dict[str, Cost]) -> Iterator[str]:
    """A row a pair: what was measured, and the cost of its engine and of its trainer as shares of fp32's."""
    paths, fp32, confidence = Paths(Path(config.output)), cost["fp32"], config.report.confidence
    objectives = config.mismatch.gradient_fidelity.objectives
    yield (
        f"| engine | trainer | k3 (nats a token) | ESS/N | {' | '.join(f'cosine, {name}' for name in objectives)} "
        "| decoding, time | weights | training, time | kept for backward |"
    )
    yield f"|{'---|' * (8 + len(objectives))}"
    for job in jobs.jobs(config, "mismatch"):
        if job["model"] != model:
            continue
        metrics = artifacts.read_json(paths.of("mismatch", **job))["metrics"]
        fidelity = artifacts.read_json(paths.of("fidelity", **job))["objectives"]
        engine, trainer = cost[job["rollout"]], cost[job["train"]]
        numbers = [
            *(with_interval(estimate(metrics[name]), 2) for name in ("k3", "ess_share")),
            *(with_interval(estimate(fidelity[name]["cosine"]), 2) for name in objectives),
            with_interval(share(engine.decoding, fp32.decoding, confidence), 2),
            number(engine.weights_bytes / fp32.weights_bytes, 2),
            with_interval(share(trainer.training, fp32.training, confidence), 2),
            number(trainer.kept_bytes / fp32.kept_bytes, 2),
        ]
        yield f"| {job['rollout']} | {job['train']} | {' | '.join(numbers)} |"


def trained(config: Config) -> Iterator[str]:
    """What the runs of each precision and objective reached, seed by seed, and the mismatch that they began with."""
    assert config.training is not None
    paths, confidence = Paths(Path(config.output)), config.report.confidence
    first, last = slice(ITERATIONS), slice(-ITERATIONS, None)
    yield f"| precision (trainer-engine) | objective | reward, last {ITERATIONS}, by seed | k3, first {ITERATIONS} |"
    yield "|---|---|---|---|"
    for name in config.training.precisions:
        for objective in config.training.objectives:
            logs = [
                training.read(paths.of("training_log", run=run.name), run, config.training.iterations).series
                for run in jobs.runs(config)
                if (run.precision, run.objective) == (name, objective)
            ]
            rewards = [with_interval(mean(log["reward"][last], confidence), 2) for log in logs]
            start = mean(np.concatenate([log["k3"][first] for log in logs]), confidence)
            yield f"| {name} | {objective} | {', '.join(rewards)} | {with_interval(start, 2)} |"


def tables(config: Config, names: list[str]) -> Iterator[str]:
    """All of it as Markdown; the cost is that of the first model, whose shapes the others share."""
    cost = costs(config, Paths(Path(config.output)).of("model", model=names[0]))
    fp32, confidence, tokens = cost["fp32"], config.report.confidence, RESPONSES * TOKENS
    decoding, both_passes = (
        with_interval(mean(np.multiply(timing.seconds, 1e6 / tokens), confidence))
        for timing in (fp32.decoding, fp32.training)
    )
    yield (
        f"Time and memory are shares of fp32's: decoding {decoding} µs a token, {fp32.weights_bytes / MEGABYTE:.3g} MB "
        f"of weights in the engine, forward and backward pass {both_passes} µs a token, of which "
        f"{fp32.kept_bytes / tokens:,.0f} bytes are kept for the backward pass. Intervals are {percent(confidence)}: "
        f"those of k3, ESS/N and cosines over problems, those of times over {ROUNDS} rounds, in each of which every "
        "precision ran. Memory is counted."
    )
    for name in names:
        yield from ("", f"## {name}", "", *offline(config, name, cost))
    if config.training:
        yield from (
            "",
            "## Trainings",
            "",
            f"Rewards of a seed are means over its last {ITERATIONS} iterations, k3 is the mean over the first "
            f"{ITERATIONS} of all seeds; intervals are Student's {percent(confidence)} over these iterations, each of "
            "which draws problems and responses anew. They say nothing of other seeds.",
            "",
            *trained(config),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", type=Path, default=[Path("config/grid.yaml")])
    parser.add_argument("--models", nargs="+", default=["gain16", "gain320"], help="models whose numbers are shown")
    options = parser.parse_args()
    print(*tables(load(options.config), options.models), sep="\n")


if __name__ == "__main__":
    main()
