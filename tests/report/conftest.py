"""Artefacts of a small run, made from random numbers with known properties: for tests of the report alone."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfmatch import artifacts, jobs
from halfmatch.config import Config
from halfmatch.evaluation import Tally, scores
from halfmatch.mismatch.offline import analyse
from halfmatch.paths import Paths, Run
from halfmatch.report.results import Results, collect
from halfmatch.steps import provenance

PROBLEMS = 16
SAMPLES = 4
# KL a token by model and dtype: d is normal noise of variance 2k and mean −k, so E[e^d] = 1 and the σ law holds.
KL = {"gain16": 8e-4, "gain120": 3e-2}
DTYPE = {"bf16": 1.0, "fp16": 1 / 60, "fp32": 1e-7}
ENGINE = {"transformers": 1.0, "vllm": 1.5}
VALIDATED = {"bf16": 0.3, "fp16": 0.6}  # at the end of a training
COSINES = {"pg": (0.95, 0.9995), "pg-seq-is": (0.6, 0.99), "grpo-token-tis": (0.85, 0.999)}


def make_config(root: Path, **changes: Any) -> Config:
    """Two models in two precisions, and a training matrix of two precisions, two objectives and three seeds."""
    models = {name: {"source": "bootstrap", "bootstrap": {}} for name in KL}
    settings = {
        "output": str(root),
        "models": models,
        "solvability": {"model": "gain120"},
        "mismatch": {
            "models": list(KL),
            "precisions": ["bf16", "fp16"],
            "gradient_fidelity": {"objectives": list(COSINES)},
        },
        "training": {
            "precisions": ["bf16", "fp16"],
            "objectives": ["grpo", "pg-seq-is"],
            "seeds": [0, 1, 2],
            "learning_rate": 1.5e-5,
        },
        "evaluation": {"samples": 8, "k": [1, 4]},
    }
    return Config.model_validate({**settings, **changes})


def write_all(config: Config) -> None:
    """Every artefact that the configuration asks for."""
    for job in jobs.jobs(config, "mismatch"):
        write_mismatch(config, job)
    for run in jobs.runs(config):
        write_run(config, run)
    for job in jobs.jobs(config, "evaluate"):
        write_evaluation(config, job)
    for job in jobs.jobs(config, "validate"):
        write_validation(config, job)
    write_perfectible(config)
    for name in jobs.problem_sets(config):
        path = Paths(Path(config.output)).of("excluded", problems=name)
        rows = [{"row": 3, "reason": "duplicate of row 1", "problem": "2×3"}]
        artifacts.write(path, "excluded", rows if name == "train" else [], source(config, "problems", problems=name))


def source(config: Config, step: str, **names: str) -> dict[str, Any]:
    return provenance(config, step, **names)


def write_mismatch(config: Config, job: dict[str, str]) -> None:
    paths = Paths(Path(config.output))
    kl = KL[job["model"]] * DTYPE[job["train"]] * ENGINE[job["engine"]]
    rng = np.random.default_rng([len(job["model"]), *job["train"].encode()])

    def rows() -> Iterator[dict[str, Any]]:
        for problem in range(PROBLEMS):
            for sample in range(SAMPLES):
                length = int(rng.integers(56, 67))
                rollout = -rng.exponential(1.0, length)
                train = rollout + rng.normal(-kl, np.sqrt(2 * kl), length)
                yield {
                    "problem_id": f"p{problem:02d}",
                    "sample": sample,
                    "token_ids": [5] * length,
                    "logp_rollout": rollout,
                    "logp_train": np.minimum(train, 0),
                }

    path = paths.of("scores", **job)
    artifacts.write(path, "scores", rows(), source(config, "scores", **job))
    rollouts = {name: job[name] for name in ("model", "problems", "engine", "rollout")}
    engine = {"name": job["engine"], "dtype": job["rollout"], "emulated": True}
    artifacts.write(
        paths.of("rollouts", **rollouts),
        "completions",
        [],
        {**source(config, "rollouts", **rollouts), "dtype": job["rollout"], "engine": engine},
    )
    analysis = analyse(path, bootstrap_samples=200, seed=0, confidence=config.report.confidence)
    artifacts.write_json(paths.of("mismatch", **job), analysis, source(config, "mismatch", **job))
    fidelity = {
        "problems": PROBLEMS,
        "objectives": {
            name: {"cosine": {"value": cosine, "low": cosine - 0.03, "high": min(1.0, cosine + 0.02)}}
            for name, cosine in ((name, pair[job["train"] != "bf16"]) for name, pair in COSINES.items())
        },
    }
    artifacts.write_json(paths.of("fidelity", **job), fidelity, source(config, "fidelity", **job))


def write_origin(config: Config, job: dict[str, str]) -> None:
    """Errors of two layers that grow with depth, and two parts that take away 90 % and 10 % of the KL."""
    unit = {"bf16": 2e-3, "fp16": 2.5e-4, "fp32": 3e-8}[job["train"]]

    def known(value: float | None) -> dict[str, float | None]:
        return {"value": value, "low": value and 0.9 * value, "high": value and 1.1 * value}

    operations = [
        {
            "layer": layer,
            "operation": operation,
            "path": f"{layer}.{operation}",
            **{
                name: known(unit * (1 + (layer if layer is not None else 2)))
                for name in ("engine", "trainer", "difference", "weights")
            },
            **{name: known(None if operation == "residual" else unit) for name in ("engine_own", "trainer_own")},
        }
        for layer, names in (
            *((layer, ("norm", "attention", "mlp", "residual")) for layer in (0, 1)),
            (None, ("norm", "lm_head")),
        )
        for operation in names
    ]
    kl = KL[job["model"]] * DTYPE[job["train"]]
    parts = [
        {"part": part, "kl": known((1 - removed) * kl), "k3": known((1 - removed) * kl), "removed": known(removed)}
        for part, removed in (("attention", 0.9), ("mlp", 0.1))
    ]
    content = {
        "responses": 8,
        "tokens": 500,
        "kl": known(kl),
        "k3": known(kl),
        "operations": operations,
        "parts": parts,
    }
    artifacts.write_json(Paths(Path(config.output)).of("origin", **job), content, source(config, "origin", **job))


def write_run(config: Config, run: Run, iterations: int | None = None, collapse: int | None = None) -> None:
    """A training log whose reward rises, sooner in fp16; with `collapse`, until that iteration."""
    assert config.training is not None
    rng = np.random.default_rng([*run.name.encode()])
    fp16 = run.precision == "fp16"
    rows = []
    steps = config.training.gradient_steps
    for step in range((iterations or config.training.iterations) * steps):
        iteration, place = divmod(step, steps)
        reward = 1 - 0.55 * np.exp(-iteration / (15 if fp16 else 30)) + rng.normal(0, 0.02)
        event = None
        if collapse is not None and iteration >= collapse:
            reward = 0.05
            event = "collapse of the reward: it fell to 0.050 from 0.700" if step == collapse * steps else None
        first = place == 0
        k3 = KL["gain120"] * DTYPE[run.precision] * np.exp(rng.normal(0, 0.2))
        rows.append(
            {
                "iteration": iteration,
                "step": step,
                "reward": float(np.clip(reward, 0, 1)),
                "response_tokens": 62.0,
                "truncated_responses": 0.0,
                "timeout_responses": 0.0,
                "k1": k3 if first else None,
                "k2": k3 if first else None,
                "k3": k3 if first else None,
                "mean_abs_prob_diff": 0.01 if first else None,
                "max_prob_diff": 0.05 if fp16 else float(rng.uniform(0.3, 0.9)) if first else None,
                "min_prob_diff": -0.04 if first else None,
                "kl_sequence": 62 * k3 if first else None,
                "sigma": float(np.sqrt(124 * k3)) if first else None,
                "ess_share": float(np.exp(-124 * k3)) if first else None,
                "entropy": float(0.8 * np.exp(-iteration / 60) + rng.normal(0, 0.01)),
                "loss": float(rng.normal(0, 0.01)),
                "gradient_norm": float(np.exp(rng.normal(0 if fp16 else 1, 0.3))),
                "learning_rate": 1.5e-5,
                "loss_scale": 65536.0 / 2 ** min(step, 3) if fp16 else None,
                "step_skipped": fp16 and step < 3,
                "skip_share": min(step + 1, 3) / (step + 1) if fp16 else 0.0,
                "event": event,
            }
        )
    path = Paths(Path(config.output)).of("training_log", run=run.name)
    artifacts.write(path, "training_log", rows, source(config, "train", run=run.name))


def write_perfectible(config: Config) -> None:
    rng = np.random.default_rng(5)
    rows = []
    for number in range(48):
        solved = int(np.clip(rng.normal(20, 10), 0, 40))
        truncated = int(rng.integers(0, 41 - solved))
        rows.append(
            {
                "problem_id": f"p{number:02d}",
                "problem": f"problem {number}",
                "answer": str(number),
                "source": "generator",
                "split": "train",
                "level": None,
                "tries": 40,
                "solved": solved,
                "wrong": 40 - solved - truncated,
                "truncated": truncated,
                "timeout": 0,
                "unparseable": 0,
                "solve_rate": solved / 40,
                "solve_rate_low": max(0, solved / 40 - 0.1),
                "solve_rate_high": min(1, solved / 40 + 0.1),
                "kept": 8 <= solved <= 32,
            }
        )
    artifacts.write(Paths(Path(config.output)).of("perfectible"), "perfectible", rows, source(config, "perfectible"))


def write_evaluation(config: Config, job: dict[str, str]) -> None:
    """Scores that do not differ between precisions for the initial model, and do for trained ones; deployed, a model
    that was trained in BF16 loses an answer to each problem that its trainer always solves, and others lose none."""
    assert config.evaluation is not None
    rng = np.random.default_rng([*job["problems"].encode()])
    chances = rng.uniform(0.2, 0.8, PROBLEMS)
    if job["run"] != jobs.INITIAL:
        chances = chances ** (0.2 if job["run"].startswith("fp16") else 0.5)
    rng = np.random.default_rng([*job["rollout"].encode(), *job["run"].encode()])
    samples = config.evaluation.samples
    correct = rng.binomial(samples, chances)
    if job["run"].startswith("bf16") and job["engine"] != jobs.TRAINER:
        correct = correct - (correct == samples)
    tallies = [
        Tally(samples, int(count), samples - int(count), 0, 0, 0, (samples - int(count),) if count < samples else ())
        for count in correct
    ]
    rows = [
        {"problem_id": f"p{number:02d}", **dataclasses.asdict(tally), "mean_tokens": 61.5}
        for number, tally in enumerate(tallies)
    ]
    metrics = scores(tallies, config.evaluation.k, bootstrap_samples=200, seed=0, confidence=config.report.confidence)
    paths, origin = Paths(Path(config.output)), source(config, "evaluate", **job)
    artifacts.write(paths.of("evaluation", **job), "evaluation", rows, origin)
    responses = [
        {
            "problem_id": f"p{number:02d}",
            "sample": sample,
            "prompt_ids": [2],
            "token_ids": [3, int(sample < count)],
            "logprobs": [-0.5, -0.5],
            "finish_reason": "stop",
            "verdict": "correct" if sample < count else "wrong",
        }
        for number, count in enumerate(correct)
        for sample in range(samples)
    ]
    artifacts.write(paths.of("evaluated_responses", **job), "completions", responses, origin)
    artifacts.write_json(paths.of("evaluation_metrics", **job), metrics, origin)


def write_validation(config: Config, job: dict[str, str]) -> None:
    """Scores that rise along the training, sooner in FP16, and by a hundredth more with every seed."""
    assert config.training is not None
    assert config.training.keep_weights_every is not None
    assert config.evaluation is not None
    run, every = Run.parse(job["run"]), config.training.keep_weights_every
    content: dict[str, Any] = {"scores": {}, "not_finite": {}}
    for benchmark in config.evaluation.benchmarks:
        content["scores"][benchmark] = {
            str(iteration): {"metrics": {"avg": {"value": score, "low": score - 0.05, "high": score + 0.04}}}
            for iteration in range(every, config.training.iterations + 1, every)
            for score in [VALIDATED[run.precision] * iteration / config.training.iterations + run.seed / 100]
        }
    path = Paths(Path(config.output)).of("validation_metrics", **job)
    artifacts.write_json(path, content, source(config, "validate", **job))


class Synthetic:
    """Writers of artefacts: of a whole run, or of one job."""

    config = staticmethod(make_config)
    everything = staticmethod(write_all)
    mismatch = staticmethod(write_mismatch)
    origin = staticmethod(write_origin)
    training = staticmethod(write_run)
    evaluation = staticmethod(write_evaluation)
    validation = staticmethod(write_validation)
    perfectible = staticmethod(write_perfectible)


@pytest.fixture(scope="session")
def synthetic() -> type[Synthetic]:
    return Synthetic


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A configuration all of whose artefacts are there; treat them as read-only."""
    config = make_config(tmp_path_factory.mktemp("finished"))
    write_all(config)
    return config


@pytest.fixture(scope="session")
def results(finished: Config) -> Results:
    """All of it, read."""
    return collect(finished)


@pytest.fixture(scope="session")
def validated(finished: Config, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same with weights along the training: after 20, 40 and 60 iterations."""
    root = tmp_path_factory.mktemp("validated")
    shutil.copytree(finished.output, root, dirs_exist_ok=True)
    training = finished.training.model_dump() | {"keep_weights_every": 20} if finished.training else None
    config = make_config(root, training=training)
    for job in jobs.jobs(config, "validate"):
        write_validation(config, job)
    return collect(config)


@pytest.fixture(scope="session")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A grid of two precisions on one model."""
    config = make_config(tmp_path_factory.mktemp("crossed"), training=None, evaluation=None)
    grid = config.mismatch.model_copy(update={"models": ("gain16",), "grid": ("bf16", "fp16")})
    config = config.model_copy(update={"mismatch": grid})
    for job in jobs.jobs(config, "mismatch"):
        write_mismatch(config, job)
    return collect(config)


@pytest.fixture(scope="session")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """One model in two precisions, sampled from by two engines; treat its artefacts as read-only."""
    config = make_config(tmp_path_factory.mktemp("two-engines"), training=None, evaluation=None)
    mismatch = config.mismatch.model_copy(update={"models": ("gain16",), "engines": ("transformers", "vllm")})
    config = config.model_copy(update={"mismatch": mismatch})
    write_all(config)
    return config


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Where the mismatch of the two models arises in the two precisions."""
    config = make_config(tmp_path_factory.mktemp("traced"), training=None, evaluation=None)
    origin = config.mismatch.origin.model_copy(update={"enabled": True})
    config = config.model_copy(update={"mismatch": config.mismatch.model_copy(update={"origin": origin})})
    for job in jobs.jobs(config, "origin"):
        write_origin(config, job)
    return collect(config)
