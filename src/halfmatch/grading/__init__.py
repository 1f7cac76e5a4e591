r"""Verdicts on responses: math-verify in processes that check themselves and can be killed.

The answer is taken out of a response by a rule (see `extraction`) and compared with the gold answer: as text under the
rule `exact`, as mathematics under the others (see `equivalence`), in processes of their own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Self

from halfmatch.grading.extraction import RULES, extract
from halfmatch.grading.process import GradingProcess

if TYPE_CHECKING:
    from halfmatch.config import GradingRule

Label = Literal["correct", "wrong", "truncated", "timeout", "unparseable"]


@dataclass(frozen=True)
class Verdict:
    """What a response is worth.

    label: `truncated` if the response was cut off, whatever it holds; `timeout` if judging it went over the limit of
    time or memory, which says nothing about the answer; `unparseable` if it has no answer or one that nobody can read.
    answer: the text that the rule took for the answer, if any.
    """

    label: Label
    answer: str | None


class Grader:
    """Grades responses under one rule; `with Grader("boxed", timeout_s=5, workers=2) as grader: grader.grade_many(…)`.

    timeout_s: seconds of processor time for one answer; where it is over, the process is killed and replaced, and the
    other answers are not touched. Entering starts the processes, so a grader that fails its self-check raises UserError
    before anything is sampled. May be used from several threads.
    """

    def __init__(self, rule: GradingRule, timeout_s: float = 5.0, workers: int = 1):
        if rule not in RULES:
            raise ValueError(f"unknown grading rule {rule!r}; known: {', '.join(RULES)}")
        self.rule = rule
        self.timeout_s = timeout_s
        self._processes = [GradingProcess() for _ in range(workers)]
        self._idle: SimpleQueue[GradingProcess] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def __enter__(self) -> Self:
        if self.rule != "exact":
            with ThreadPoolExecutor(len(self._processes)) as threads:
                list(threads.map(GradingProcess.start, self._processes))
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the grading processes; the next use starts them again."""
        for process in self._processes:
            process.close()

    def grade_many(self, responses: Sequence[tuple[str, str, bool]]) -> list[Verdict]:
        """The verdicts of (response, gold answer, whether the response was truncated), in order."""
        answers = [None if truncated else extract(response, self.rule) for response, _, truncated in responses]
        pairs = [(answer, gold) for answer, (_, gold, _) in zip(answers, responses, strict=True) if answer is not None]
        labels = self._labels(dict.fromkeys(pairs))
        return [
            Verdict("truncated" if truncated else "unparseable", None)
            if answer is None
            else Verdict(labels[answer, gold], answer)
            for answer, (_, gold, truncated) in zip(answers, responses, strict=True)
        ]

    def _labels(self, pairs: dict[tuple[str, str], None]) -> dict[tuple[str, str], Label]:
        """The label of each distinct (answer, gold answer)."""
        if self.rule == "exact":
            return {(answer, gold): "correct" if answer == gold.strip() else "wrong" for answer, gold in pairs}
        with ThreadPoolExecutor(len(self._processes)) as threads:
            return dict(zip(pairs, threads.map(self._judge, pairs), strict=True))

    def _judge(self, pair: tuple[str, str]) -> Label:
        return self._ask("judge", *pair) or "timeout"

    def parses(self, gold: str) -> bool:
        """Whether a gold answer can be compared with under this rule."""
        if self.rule == "exact":
            return bool(gold.strip())
        return bool(gold.strip()) and self._ask("parses", gold) is True

    def _ask(self, task: str, *arguments: str) -> Any:
        process = self._idle.get()
        try:
            return process.ask(task, *arguments, timeout_s=self.timeout_s)
        finally:
            self._idle.put(process)


@functools.cache
def _shared(process_id: int, rule: GradingRule, timeout_s: float) -> Grader:
    """The grader of this process for single calls; a fork of it gets its own, as two must not share a connection."""
    return Grader(rule, timeout_s)


def grade(
    response: str, gold: str, *, rule: GradingRule = "boxed", truncated: bool = False, timeout_s: float = 5.0
) -> Verdict:
    """The verdict of one response, by a grading process that stays for the next call."""
    return _shared(os.getpid(), rule, timeout_s).grade_many([(response, gold, truncated)])[0]


def parses(gold: str, rule: GradingRule = "boxed", *, timeout_s: float = 5.0) -> bool:
    """Whether a gold answer can be compared with under a rule; False also where that takes more than the limit."""
    return _shared(os.getpid(), rule, timeout_s).parses(gold)
