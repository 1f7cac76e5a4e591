"""Graded responses, and those of a job that need not be sampled again: of one that was killed, or asked for fewer.

Responses are sampled from their own seeds, so which of them are sampled together changes none. They are kept a call of
the engine at a time, in a folder beside the results that no tool removes when it runs a job again.
"""

from __future__ import annotations

import heapq
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmatch import artifacts
from halfmatch.engines import Completion
from halfmatch.grading import Verdict

Key = tuple[str, int]  # problem_id, sample


@dataclass(frozen=True)
class Response:
    """One graded completion of a problem."""

    problem_id: str
    sample: int
    prompt_ids: list[int]
    completion: Completion
    verdict: Verdict

    @property
    def key(self) -> Key:
        return self.problem_id, self.sample

    def row(self) -> dict[str, Any]:
        """The response as a row of the table of completions."""
        return {
            "problem_id": self.problem_id,
            "sample": self.sample,
            "prompt_ids": self.prompt_ids,
            "token_ids": self.completion.token_ids,
            "logprobs": self.completion.logprobs,
            "finish_reason": self.completion.finish_reason,
            "verdict": self.verdict.label,
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Response:
        """The response of a row of the table of responses, which has the answer as well."""
        completion = Completion(row["token_ids"], row["logprobs"], row["finish_reason"])
        verdict = Verdict(row["verdict"], row["answer"])
        return cls(row["problem_id"], row["sample"], row["prompt_ids"], completion, verdict)


class KeptResponses:
    """The responses of one job, in a folder of its own.

    `course` says what a response depends on, beside its problem and its number; those of another course are
    removed.
    """

    def __init__(self, folder: Path, course: Mapping[str, str]):
        self.folder = folder
        described = json.dumps(course, sort_keys=True)
        marker = folder / "course.json"
        if not marker.is_file() or marker.read_text(encoding="utf-8") != described:
            self.remove()
            with artifacts.atomic(marker, "w") as file:
                file.write(described)

    def keys(self) -> set[Key]:
        """Which responses are kept."""
        tables = [artifacts.read(path, "responses", ["problem_id", "sample"]) for path in self._files()]
        return {(row["problem_id"], row["sample"]) for table in tables for row in table.to_pylist()}

    def add(self, responses: Sequence[Response]) -> None:
        """Keep responses, in the order of their keys; all of them or, where this is killed, none."""
        first = responses[0]
        rows = ({**response.row(), "answer": response.verdict.answer} for response in responses)
        artifacts.write(self.folder / f"{first.problem_id}-{first.sample:06d}.parquet", "responses", rows, {})

    def wanted(self, keys: Collection[Key]) -> Iterator[Response]:
        """Those of the kept responses that are wanted, in the order of their keys."""
        last: Key | None = None
        for response in heapq.merge(*map(_responses, self._files()), key=lambda response: response.key):
            if response.key in keys and response.key != last:
                last = response.key
                yield response

    def remove(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[!.]*.parquet"))


def _responses(path: Path) -> Iterator[Response]:
    for group in artifacts.row_groups(path, "responses"):
        yield from map(Response.of, group.to_pylist())
