"""One measurement, from a model to its verdict.

Responses are sampled here (or were recorded by others), the trainer's own forward pass scores them in each dtype asked
for, and what comes out is measured as in the pipeline. Artefacts lie as the pipeline's do, below the output folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmatch import __version__, artifacts, models
from halfmatch.config import Sampling
from halfmatch.errors import UserError
from halfmatch.measure import prompts, sources, summary
from halfmatch.mismatch import foreign, offline
from halfmatch.paths import Paths
from halfmatch.precision import DType, Precision
from halfmatch.progress import Progress
from halfmatch.sampling import SLOT_FILLS_A_CALL
from halfmatch.seeds import request_seed

if TYPE_CHECKING:
    from halfmatch.measure.options import Settings
    from halfmatch.measure.prompts import TokenPrompt

PROBLEMS = "prompts"
FOREIGN, RECORDED = "others", "recorded"
MICRO_BATCH_TOKENS = 4096
# Prompts to a response of each of which both sides' routing is compared, where the model is a mixture of experts.
ROUTED_PROMPTS = 16


def run(settings: Settings) -> str:
    """Measure; write artefacts and figures; the table and the verdict as text."""
    name = sources.name_of(settings.model or str(settings.rollouts))
    measurement = _Measurement(settings, name)
    cells = list(measurement.foreign_cells() if settings.rollouts else measurement.sampled_cells())
    return summary.write(cells, settings.output, confidence=settings.confidence)


class _Measurement:
    """One measurement: where its files lie and what they are made from."""

    def __init__(self, settings: Settings, name: str):
        self.settings, self.name = settings, name
        self.paths = Paths(settings.output)
        self.folder: Path | None = None
        if settings.model:
            self.folder = self.paths.of("model", model=name)
            sources.place(settings.model, self.folder)

    # ------------------------------------------------------------------------------------------------------ sampled
    def sampled_cells(self) -> Iterator[summary.Cell]:
        """Sample in each rollout dtype, and score what came out in each train dtype."""
        assert self.folder is not None
        tokenizer = models.load_tokenizer(self.folder)
        chosen = self._prompts(tokenizer)
        for rollout in self.settings.rollout_dtypes:
            table = self._sample(chosen, tokenizer, rollout)
            for train in self.settings.train_dtypes or (rollout,):
                yield self._score(
                    self.settings.engine.name,
                    rollout,
                    train,
                    lambda table=table: _completions(table),
                    artifacts.open_table(table, "completions").metadata.num_rows,
                    {"rollouts": _sha256(table)},
                )

    def _prompts(self, tokenizer: Any) -> list[TokenPrompt]:
        settings = self.settings
        if settings.prompt_file:
            chat = None if settings.template is None else settings.template in ("chat", "r1")
            found = prompts.of_file(tokenizer, settings.prompt_file, chat=chat)
        elif settings.problems:
            found = prompts.of_texts(tokenizer, sources.problems(settings.problems), settings.template)
        else:
            found = prompts.of_texts(tokenizer, prompts.built_in(settings.count, settings.seed), settings.template)
        # by a hash of the name and the seed, so that which prompts are taken depends on them alone
        order = sorted(found, key=lambda prompt: request_seed(settings.seed, prompt.problem_id, 0, "chosen"))
        return sorted(order[: settings.count], key=lambda prompt: prompt.problem_id)

    def _sample(self, chosen: list[TokenPrompt], tokenizer: Any, rollout: DType) -> Path:
        from halfmatch import engines
        from halfmatch.prompts import stop_token_ids

        assert self.folder is not None
        settings = self.settings
        path = self.paths.of(
            "rollouts", model=self.name, problems=PROBLEMS, engine=settings.engine.name, rollout=rollout
        )
        tasks = [(prompt, sample) for prompt in chosen for sample in range(settings.samples)]
        sampling = Sampling(temperature=settings.temperature, top_p=1.0, max_tokens=settings.max_tokens)
        stop = stop_token_ids(self.folder, tokenizer)
        engine = engines.create(settings.engine.name, self.folder, self._precision(rollout), settings.engine)
        try:
            source = self._provenance({"prompts": _digest([prompt.token_ids for prompt in chosen])})
            source |= {"dtype": engine.dtype, "engine": dict(engine.description)}
            calls = SLOT_FILLS_A_CALL * settings.engine.slots
            with (
                Progress(f"rollouts in {rollout}", len(tasks), "responses") as progress,
                artifacts.Writer(path, "completions", source) as out,
            ):
                for start in range(0, len(tasks), calls):
                    part = tasks[start : start + calls]
                    requests = [
                        engines.Request(
                            prompt.token_ids, request_seed(settings.seed, prompt.problem_id, sample, "measure")
                        )
                        for prompt, sample in part
                    ]
                    completions = engine.generate(requests, sampling, stop_token_ids=stop, progress=progress)
                    out.write(
                        {
                            "problem_id": prompt.problem_id,
                            "sample": sample,
                            "prompt_ids": list(prompt.token_ids),
                            "token_ids": completion.token_ids,
                            "logprobs": completion.logprobs,
                            "finish_reason": completion.finish_reason,
                            "verdict": None,
                        }
                        for (prompt, sample), completion in zip(part, completions, strict=True)
                    )
        finally:
            engine.close()
        return path

    # ------------------------------------------------------------------------------------------------------ foreign
    def foreign_cells(self) -> Iterator[summary.Cell]:
        """Score rollouts that others made, or take what their trainer recorded where no model is given."""
        path = self.settings.rollouts
        assert path is not None
        rollouts = sorted(foreign.read(path, self.settings.columns), key=lambda rollout: rollout.problem_id)
        inputs = {"rollouts": _sha256(path)}
        if self.folder is None:
            without = sum(rollout.logp_train is None for rollout in rollouts)
            if without:
                raise UserError(
                    f"{path}: {without} of {len(rollouts)} responses have no log-probs of the trainer "
                    f"({', '.join(foreign.COLUMNS['logp_train'])}); give the model, and they are computed here"
                )
            yield self._write(
                FOREIGN, RECORDED, RECORDED, ((rollout, rollout.logp_train) for rollout in rollouts), inputs, {}
            )
            return
        if any(rollout.prompt_ids is None for rollout in rollouts):
            raise UserError(f"{path}: scoring needs prompts as token ids ({', '.join(foreign.COLUMNS['prompt_ids'])})")
        for train in self.settings.train_dtypes or self.settings.rollout_dtypes:
            yield self._score(FOREIGN, RECORDED, train, lambda: iter([rollouts]), len(rollouts), inputs)

    # ------------------------------------------------------------------------------------------------------ scoring
    def _score(
        self,
        engine: str,
        rollout: str,
        train: DType,
        groups: Any,
        total: int,
        inputs: dict[str, str],
    ) -> summary.Cell:
        """Score groups of rollouts in one train dtype."""
        import torch

        from halfmatch.precision.casting import cast_model
        from halfmatch.precision.emulation import is_emulated
        from halfmatch.rl.scoring import response_logprobs

        assert self.folder is not None
        torch.set_num_threads(1)
        precision, device = self._precision(train), self.settings.engine.device
        policy = models.load(self.folder, torch.float32).to(device)
        cast_model(policy, precision.compute, precision.fp32_modules, precision.emulate)

        def scored(progress: Progress) -> Iterator[tuple[foreign.Rollout, np.ndarray]]:
            for group in groups():
                logp = response_logprobs(
                    policy,
                    [item.prompt_ids for item in group],
                    [item.token_ids for item in group],
                    temperature=self.settings.temperature,
                    micro_batch_tokens=MICRO_BATCH_TOKENS,
                    progress=progress,
                )
                yield from zip(group, logp, strict=True)

        computed = {"dtype": train, "emulated": is_emulated(train, precision.emulate, device)}
        more = self._router_agreement(policy, rollout, groups()) if engine == "transformers" else {}
        with Progress(f"scores in {train}", total, "responses") as progress:
            return self._write(engine, rollout, train, scored(progress), inputs, computed, more)

    def _router_agreement(self, policy: Any, rollout: Any, groups: Iterable[list[foreign.Rollout]]) -> dict[str, Any]:
        """For a mixture of experts: whether the engine, decoding again, takes the same ones as the trainer's pass."""
        import torch

        from halfmatch.mismatch import routing
        from halfmatch.models.routing import is_mixture
        from halfmatch.precision.casting import cast_model

        assert self.folder is not None
        if not is_mixture(policy.config):
            return {}
        firsts = {item.problem_id: item for item in reversed(next(iter(groups))) if len(item.token_ids)}
        chosen = [firsts[name] for name in sorted(firsts)[:ROUTED_PROMPTS]]
        precision = self._precision(rollout)
        decoder = models.load(self.folder, torch.float32).to(policy.device)
        cast_model(decoder, precision.rollout, precision.fp32_modules, precision.emulate)
        found = routing.agreement(
            decoder,
            policy,
            [item.prompt_ids or () for item in chosen],
            [item.token_ids for item in chosen],
            bootstrap_samples=self.settings.bootstrap_samples,
            seed=self.settings.seed,
            confidence=self.settings.confidence,
        )
        return {"router_agreement": found}

    def _write(
        self,
        engine: str,
        rollout: str,
        train: str,
        scored: Iterable[tuple[foreign.Rollout, Any]],
        inputs: dict[str, str],
        computed: dict[str, Any],
        more: Mapping[str, Any] | None = None,
    ) -> summary.Cell:
        """Write scores of the sampled tokens, measure them, and write that too, with `more` that was measured."""
        names = {"model": self.name, "problems": PROBLEMS, "engine": engine, "rollout": rollout, "train": train}
        settings, path = self.settings, self.paths.of("scores", **names)
        source = {**self._provenance(inputs), **computed}
        with artifacts.Writer(path, "scores", source) as out:
            out.write(_numbered(scored))
        analysis = offline.analyse(
            path, bootstrap_samples=settings.bootstrap_samples, seed=settings.seed, confidence=settings.confidence
        )
        analysis |= more or {}
        offline.write_curves(self.paths.of("mismatch_curves", **names), offline.curves(analysis))
        artifacts.write_json(self.paths.of("mismatch", **names), analysis, self._provenance({"scores": _sha256(path)}))
        return summary.Cell(self.name, engine, rollout, train, analysis, path)

    def _precision(self, dtype: DType) -> Precision:
        return Precision.named(dtype, fp32_modules=self.settings.fp32_modules)

    def _provenance(self, inputs: Mapping[str, str]) -> dict[str, Any]:
        """What an artefact follows from: the settings that are not its own name, the inputs, the versions."""
        settings = self.settings
        return {
            "step": "measure",
            "settings": {
                "temperature": settings.temperature,
                "max_tokens": settings.max_tokens,
                "samples": settings.samples,
                "seed": settings.seed,
                "fp32_modules": list(settings.fp32_modules),
            },
            "inputs": {**inputs, **({"model": models.digest(self.folder)} if self.folder else {})},
            "versions": {
                "halfmatch": __version__,
                **{name: metadata.version(name) for name in ("pyarrow", "torch", "transformers")},
            },
        }


def _completions(path: Path) -> Iterator[list[foreign.Rollout]]:
    """A table of completions, a row group at a time; every token of it was sampled."""
    for group in artifacts.row_groups(path, "completions"):
        yield [
            foreign.Rollout(
                problem_id=row["problem_id"],
                prompt_ids=row["prompt_ids"],
                token_ids=row["token_ids"],
                sampled=np.ones(len(row["token_ids"]), dtype=bool),
                logp_rollout=np.asarray(row["logprobs"], dtype=np.float32),
                logp_train=None,
            )
            for row in group.to_pylist()
        ]


def _numbered(scored: Iterable[tuple[foreign.Rollout, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of the table of scores, of sampled tokens alone; the responses to a problem are numbered as they come."""
    seen: dict[str, int] = {}
    for rollout, logp in scored:
        sample = seen[rollout.problem_id] = seen.get(rollout.problem_id, -1) + 1
        yield {
            "problem_id": rollout.problem_id,
            "sample": sample,
            "token_ids": np.asarray(rollout.token_ids)[rollout.sampled].tolist(),
            "logp_rollout": rollout.logp_rollout[rollout.sampled].tolist(),
            "logp_train": np.asarray(logp)[rollout.sampled].tolist(),
        }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
