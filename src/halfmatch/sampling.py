"""Responses to a set of problems: prompted, sampled by the engine, graded.

Solvability, rollouts and evaluation do the same here and differ in the model, the settings and the seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from halfmatch import engines, models, prompts
from halfmatch.config import Config, Sampling
from halfmatch.engines import Request
from halfmatch.errors import UserError
from halfmatch.grading import Grader
from halfmatch.progress import Progress
from halfmatch.responses import KeptResponses, Key, Response
from halfmatch.seeds import request_seed

if TYPE_CHECKING:
    import pyarrow as pa

# Requests that the engine gets at a time: enough to keep its slots full, and little enough to hold in memory.
SLOT_FILLS_A_CALL = 8


class Sampler:
    """A model folder behind an engine, with its tokenizer and a grader: `with Sampler(…) as sampler: …`."""

    def __init__(self, config: Config, model: Path, *, engine: str, precision: str, sampling: Sampling):
        self._config, self._model, self._sampling = config, model, sampling
        self._engine_name, self._precision = engine, precision

    def __enter__(self) -> Self:
        config, precision = self._config, self._config.precisions[self._precision]
        with ExitStack() as stack:
            grading = config.grading
            self._grader = stack.enter_context(
                Grader(rule=grading.rule, timeout_s=grading.timeout_s, workers=grading.workers)
            )
            self._tokenizer = models.load_tokenizer(self._model)
            self._stop_token_ids = prompts.stop_token_ids(self._model, self._tokenizer)
            self._engine = engines.create(self._engine_name, self._model, precision, config.engine)
            stack.callback(self._engine.close)
            side = engines.side_of(self._engine_name)
            if self._engine.dtype != getattr(precision, side):
                raise UserError(
                    f"the engine {self._engine_name} computes in {self._engine.dtype}, and "
                    f"precisions.{self._precision}.{side} asks for {getattr(precision, side)}"
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def provenance(self) -> dict[str, Any]:
        """What really sampled: engine, version, dtype."""
        return {"dtype": self._engine.dtype, "engine": dict(self._engine.description)}

    def load_weights(self, folder: Path) -> None:
        """Answer with the weights of another folder of the same model, given to the engine as a trainer gives them."""
        import torch

        self._engine.load_weights(models.load(folder, torch.float32).named_parameters())

    def responses(
        self, problems: pa.Table, samples: int, *, kept: KeptResponses, purpose: str, label: str
    ) -> Iterator[Response]:
        """`samples` responses to each problem, by problem and sample; those that are kept are not sampled again.

        `purpose` is part of every request's seed: what is sampled for different ones is independent, and the same one
        in two precisions draws the same random numbers. `label` is what the progress says.
        """
        tasks: dict[Key, dict[str, Any]] = {
            (problem["problem_id"], sample): problem
            for problem in sorted(problems.to_pylist(), key=lambda problem: problem["problem_id"])
            for sample in range(samples)
        }
        missing = sorted(tasks.keys() - kept.keys())
        calls = SLOT_FILLS_A_CALL * self._config.engine.slots
        with Progress(label, len(tasks), "responses") as progress:
            progress(len(tasks) - len(missing))
            correct = 0
            for start in range(0, len(missing), calls):
                responses = self._call([(key, tasks[key]) for key in missing[start : start + calls]], purpose, progress)
                kept.add(responses)
                correct += sum(response.verdict.label == "correct" for response in responses)
                progress(0, f"{correct / (start + len(responses)):.1%} correct")
        yield from kept.wanted(tasks.keys())

    def _call(self, tasks: list[tuple[Key, dict[str, Any]]], purpose: str, progress: Progress) -> list[Response]:
        prompt_ids = [prompts.encode(self._tokenizer, self._config.prompt, problem["problem"]) for _, problem in tasks]
        requests = [
            Request(tuple(ids), request_seed(self._config.seed, problem_id, sample, purpose))
            for ids, ((problem_id, sample), _) in zip(prompt_ids, tasks, strict=True)
        ]
        completions = self._engine.generate(
            requests, self._sampling, stop_token_ids=self._stop_token_ids, progress=progress
        )
        texts = [prompts.decode(self._tokenizer, completion.token_ids) for completion in completions]
        verdicts = self._grader.grade_many(
            [
                (text, problem["answer"], completion.finish_reason == "length")
                for text, (_, problem), completion in zip(texts, tasks, completions, strict=True)
            ]
        )
        return [
            Response(problem_id, sample, ids, completion, verdict)
            for ((problem_id, sample), _), ids, completion, verdict in zip(
                tasks, prompt_ids, completions, verdicts, strict=True
            )
        ]
