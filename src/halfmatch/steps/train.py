"""Train one run of the matrix {precision × objective × seed}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halfmatch import artifacts, engines, models, prompts
from halfmatch.config import Config
from halfmatch.errors import UserError
from halfmatch.grading import Grader
from halfmatch.models.folder import save, staged
from halfmatch.paths import Paths, Run
from halfmatch.progress import Progress
from halfmatch.rl import objectives
from halfmatch.rl.checkpoints import Checkpoints
from halfmatch.rl.kept_weights import KeptWeights
from halfmatch.rl.ranks import join
from halfmatch.rl.rollouts import Problem
from halfmatch.rl.trainer import Trainer
from halfmatch.rl.training_log import write_curves
from halfmatch.steps import course, provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Say how long a run is, on how many ranks it is computed and what of it is kept, which may change on the way.
HOW_FAR = (
    *("training.iterations", "training.ranks", "training.nodes", "training.shard_gradients"),
    "training.keep_weights_every",
)


def run(config: Config, *, run: str) -> None:
    """Train from the latest checkpoint, or from the start; write the log, its curves, the trained model, and where they
    are kept the weights along the way."""
    torch.set_num_threads(1)
    settings, cell = config.training, Run.parse(run)
    if settings is None:
        raise UserError("the configuration has no section training, so there is no run to train")
    precision = config.precisions[cell.precision]
    paths = Paths(Path(config.output))
    folder = paths.of("model", model=config.solvability.model)
    perfectible = paths.of("perfectible")
    tokenizer = models.load_tokenizer(folder)
    problems, long = read_problems(config, perfectible, tokenizer)
    source = provenance(config, "train", inputs={"perfectible": perfectible, "model": folder}, run=run)

    with ExitStack() as stack:
        ranks = stack.enter_context(join(settings.ranks, config.engine.device))
        kept = KeptWeights(
            paths.of("checkpoints", run=run) / "weights",
            settings.keep_weights_every,
            lambda weights, target: save_trained(weights, folder, target),
        )
        checkpoints = Checkpoints(
            paths.of("checkpoints", run=run),
            course=course(config, "train", source, without=HOW_FAR, run=run),
            keep=settings.keep_checkpoints,
            ranks=ranks,
            kept=kept,
        )
        stack.enter_context(checkpoints.sole_user())
        grading = config.grading
        grader = stack.enter_context(Grader(rule=grading.rule, timeout_s=grading.timeout_s, workers=grading.workers))
        lora = settings.lora
        engine = engines.create(
            config.engine.name,
            folder,
            precision,
            config.engine,
            adapter=lora if lora and lora.push == "unmerged" else None,
            record_routing=settings.router_replay,
        )
        stack.callback(engine.close)
        with ranks.in_turn():
            trainer = Trainer(
                models.load(folder, torch.float32).to(config.engine.device if ranks.mesh is None else "cpu"),
                engine=engine,
                grader=grader,
                decode=partial(prompts.decode, tokenizer),
                stop_token_ids=prompts.stop_token_ids(folder, tokenizer),
                problems=problems,
                settings=settings,
                precision=precision,
                objective=objectives.named(cell.objective, settings.objective_settings.get(cell.objective)),
                seed=cell.seed,
                ranks=ranks,
                ranks_an_engine=config.engine.tensor_parallel if settings.ranks > 1 else 1,
            )
        rows = trainer.run(
            checkpoints,
            stack.enter_context(Progress(f"train {run}", settings.iterations, "iterations")) if ranks.first else _quiet,
        )
        weights, adapter = trainer.trained_weights(), trainer.trained_adapter()
        if not ranks.first:
            return
        if kept.every is not None:
            kept.link(trainer.iterations, paths.of("trained_weights", run=run))
        source |= {"engine": dict(engine.description), "compute": precision.compute, "long_prompts": long}

    artifacts.write(paths.of("training_log", run=run), "training_log", rows, source)
    write_curves(paths.of("training_curves", run=run), rows)
    with staged(paths.of("trained", run=run)) as trained:
        save_trained(weights, folder, trained)
        if lora:
            from halfmatch.models.lora import save_adapter

            save_adapter(adapter, lora, trained / "adapter", config.models[config.solvability.model].id)


def _quiet(done: int, note: str) -> None:
    """Progress of a rank that is not the first: the same as the first one's."""


def read_problems(config: Config, path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Problem], list[str]]:
    """The problems to train on, and the ids of those whose prompts are longer than the configuration allows."""
    assert config.training is not None
    table = artifacts.read(path, "perfectible").to_pylist()
    kept = [row for row in table if row["kept"]]
    if not kept:
        band = config.solvability
        below = sum(row["solve_rate"] < band.low for row in table)
        above = sum(row["solve_rate"] > band.high for row in table)
        raise UserError(
            f"{path}: none of {len(table)} problems is solved between {band.low:.0%} and {band.high:.0%} of the time "
            f"({below} less often, {above} more often), so there is nothing to train on. Widen solvability.low and "
            f"solvability.high, or choose other problems or another model"
        )
    limit = config.training.max_prompt_tokens
    problems, long = [], []
    for row in kept:
        prompt_ids = prompts.encode(tokenizer, config.prompt, row["problem"])
        if len(prompt_ids) > limit:
            long.append(row["problem_id"])
        else:
            problems.append(Problem(row["problem_id"], row["answer"], tuple(prompt_ids)))
    if long:
        logger.warning("%d problems have prompts of more than %d tokens and are left out: %s", len(long), limit, long)
    if not problems:
        raise UserError(
            f"{path}: all {len(kept)} kept problems have prompts of more than {limit} tokens; raise "
            f"training.max_prompt_tokens"
        )
    return problems, long


def save_trained(weights: Mapping[str, torch.Tensor], start: Path, folder: Path) -> None:
    """Write float32 weights as a model into a folder; the rest is as in the one that training started from."""
    model = models.load(start, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    save(model, models.load_tokenizer(start), folder)
