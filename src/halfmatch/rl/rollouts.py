"""Rollouts of one iteration: which problems, what the engine sampled, what the grader made of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from halfmatch.engines import Completion, Engine, Request
from halfmatch.rl.batching import Batch, collate, join, pad, pad_routing, stack_padded
from halfmatch.seeds import request_seed

if TYPE_CHECKING:
    from halfmatch.config import Sampling
    from halfmatch.grading import Grader

REWARDS = {"correct": 1.0, "wrong": 0.0, "truncated": 0.0, "unparseable": 0.0, "timeout": float("nan")}


@dataclass(frozen=True)
class Problem:
    """What training needs of a problem."""

    problem_id: str
    answer: str
    prompt_ids: tuple[int, ...]


class ProblemSampler:
    """Every problem once an epoch, each epoch in an order of its own that follows from the seed and the epoch alone.

    `position`, the number of problems drawn so far, is all of its state.
    """

    def __init__(self, problems: Sequence[Problem], seed: int):
        if not problems:
            raise ValueError("no problems to draw from")
        self.problems = sorted(problems, key=lambda problem: problem.problem_id)
        self.seed = seed
        self.position = 0

    def draw(self, count: int) -> list[tuple[int, Problem]]:
        """The next problems, each with its position in the whole sequence of draws."""
        drawn = []
        for position in range(self.position, self.position + count):
            epoch, place = divmod(position, len(self.problems))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.problems))
            drawn.append((position, self.problems[order[place]]))
        self.position += count
        return drawn


@dataclass(frozen=True)
class Rollouts:
    """The responses of one iteration, the samples of a problem side by side. B sequences, R tokens of the longest."""

    batch: Batch
    logp_rollout: torch.Tensor  # log μ, [B, R] float32 nats, 0 outside the response mask
    rewards: torch.Tensor  # [B] float32: 1 or 0, the mean of its group where the grader timed out
    verdicts: Sequence[str]  # [B]
    left_out: Sequence[str] | None = None  # verdicts of the responses that dynamic sampling, if any, has left out

    @property
    def sampled(self) -> list[str]:
        """The verdicts on all responses that were sampled."""
        return [*self.verdicts, *(self.left_out or ())]

    def share(self, verdict: str) -> float:
        """Of all responses that were sampled, the share with this verdict."""
        return self.sampled.count(verdict) / len(self.sampled)

    @property
    def mean_reward(self) -> float:
        """Over graded responses, NaN if there are none."""
        graded = [reward for verdict in self.sampled if (reward := REWARDS[verdict]) == reward]
        return sum(graded) / len(graded) if graded else float("nan")

    def columns(self, samples: int) -> dict[str, float | None]:
        """The log's columns; samples: responses a problem."""
        dynamic = self.left_out is not None
        return {
            "reward": self.mean_reward,
            "response_tokens": self.batch.response_mask.sum().item() / len(self.verdicts),
            "truncated_responses": self.share("truncated"),
            "timeout_responses": self.share("timeout"),
            "problems_drawn": len(self.sampled) // samples if dynamic else None,
            "mixed_problems": sum(mixed_problems(self.verdicts, samples)) if dynamic else None,
        }


def collect(
    drawn: Sequence[tuple[int, Problem]],
    samples: int,
    *,
    engine: Engine,
    sampling: Sampling,
    stop_token_ids: Collection[int],
    seed: int,
) -> tuple[list[Problem], list[Completion]]:
    """Sample `samples` completions of every drawn problem: the problem and the completion of each.

    A request's seed names the run's seed, the problem, the sample and the draw: a problem that comes again, in a later
    epoch or in the same iteration, is sampled anew.
    """
    pairs = [(position, problem, sample) for position, problem in drawn for sample in range(samples)]
    requests = [
        Request(problem.prompt_ids, request_seed(seed, problem.problem_id, sample, position))
        for position, problem, sample in pairs
    ]
    completions = engine.generate(requests, sampling, stop_token_ids=sorted(stop_token_ids))
    return [problem for _, problem, _ in pairs], completions


def grade(
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    *,
    grader: Grader,
    decode: Callable[[list[int]], str],
) -> list[str]:
    """The verdict on every completion. The engine's token ids are the record; text is for the grader."""
    verdicts = grader.grade_many(
        [
            (decode(completion.token_ids), problem.answer, completion.finish_reason == "length")
            for problem, completion in zip(problems, completions, strict=True)
        ]
    )
    return [verdict.label for verdict in verdicts]


def lay_out(
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    verdicts: Sequence[str],
    samples: int,
    *,
    stop_token_ids: Collection[int],
) -> Rollouts:
    """Graded completions as tensors."""
    batch = collate(
        [problem.prompt_ids for problem in problems],
        [completion.token_ids for completion in completions],
        stop_token_ids,
    )
    _check(completions, batch)
    routing = [completion.routing for completion in completions if completion.routing is not None]
    if routing:
        batch = replace(batch, routing=pad_routing(routing, batch.input_ids.shape[1] - 1))
    return Rollouts(
        batch=batch,
        logp_rollout=pad([completion.logprobs for completion in completions], batch.response_mask),
        rewards=fill_ungraded(torch.tensor([REWARDS[verdict] for verdict in verdicts]), samples),
        verdicts=verdicts,
    )


def _check(completions: Sequence[Completion], batch: Batch) -> None:
    """Refuse an engine that disagrees with the response mask: the mismatch of such tokens would be made up."""
    counts, truncated = batch.response_mask.sum(dim=1).tolist(), batch.truncated.tolist()
    for completion, count, cut in zip(completions, counts, truncated, strict=True):
        if not count == len(completion.token_ids) == len(completion.logprobs):
            raise RuntimeError(
                f"the engine gave {len(completion.token_ids)} tokens with {len(completion.logprobs)} log-probs, and "
                f"the response ends after {count}"
            )
        if cut != (completion.finish_reason == "length"):
            raise RuntimeError(
                f"the engine says {completion.finish_reason!r} of a response that "
                f"{'has no' if cut else 'ends with a'} stop token"
            )


def fill_ungraded(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Give a response without a reward (NaN) the mean of its group, so that its advantage is 0: a time-out is no
    evidence. A group without any reward is 0 throughout."""
    groups = rewards.view(-1, samples)
    return torch.where(groups.isnan(), groups.nanmean(dim=1, keepdim=True).nan_to_num(0.0), groups).view(-1)


def sample_mixed(sample: Callable[[int], Rollouts], wanted: int, samples: int, rounds: int) -> Rollouts:
    """Dynamic sampling (DAPO, arXiv 2503.14476): rollouts of `wanted` problems with right and wrong responses.

    `sample` gives rollouts of as many further problems as it is asked for, `samples` responses each. It is asked for
    those that are still missing, at most `rounds` times; what is missing then is made up of other problems, whose
    advantages are 0.
    """
    parts: list[Rollouts] = []
    mixed: list[bool] = []
    while len(parts) < rounds and sum(mixed) < wanted:
        parts.append(sample(wanted - sum(mixed)))
        mixed += mixed_problems(parts[-1].verdicts, samples)
    problems = sorted(range(len(mixed)), key=lambda problem: not mixed[problem])
    order = [problem * samples + number for problem in problems for number in range(samples)]
    rows, others = order[: wanted * samples], order[wanted * samples :]
    verdicts = [verdict for part in parts for verdict in part.verdicts]
    batch = join([part.batch for part in parts]).select(torch.tensor(rows))
    return Rollouts(
        batch=batch,
        logp_rollout=stack_padded([part.logp_rollout for part in parts])[rows, : batch.response_mask.shape[1]],
        rewards=torch.cat([part.rewards for part in parts])[rows],
        verdicts=[verdicts[row] for row in rows],
        left_out=[verdicts[row] for row in others],
    )


def mixed_problems(verdicts: Sequence[str], samples: int) -> list[bool]:
    """Whether a problem has responses of reward 0 and of reward 1, for each `samples` verdicts in a row."""
    groups = (verdicts[start : start + samples] for start in range(0, len(verdicts), samples))
    return [{REWARDS[verdict] for verdict in group} >= {0.0, 1.0} for group in groups]
