"""Where the mismatch comes from: both sides against float64, operation by operation, and with one part in fp32 at a
time.

The engine's side is its own decoding from a KV cache, given the tokens of a response; the trainer's is one forward pass
over the same tokens. Hidden states at the positions that predict a response token are compared with a float64 pass of
the weights that the side holds, that is rounded to its dtype; what their rounding does is a number of its own. An
operation's own error is what it adds to the states that it is given: the exact result for these is computed too.

How much of the KL goes away with a part in fp32 is found by computing both sides again. The KL of a position is summed
over the whole vocabulary, so it has no noise of sampling; the positions are those of the recorded response, which was
sampled without the part in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmatch import models
from halfmatch.engines.decoding import forced_logprobs
from halfmatch.mismatch.tracing import Calls, InFloat64, Operation, operations, traced
from halfmatch.precision.casting import cast_model
from halfmatch.precision.own_matmuls import one_expert_after_the_other
from halfmatch.rl.batching import collate
from halfmatch.rl.scoring import token_logprobs
from halfmatch.statistics import Estimate, bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfmatch.precision import DType, Fp32Module, Precision

FloatArray = NDArray[np.float64]

# What is measured of an operation, relative to the exact result, as root mean square over positions.
MEASURES = ("engine", "trainer", "difference", "weights", "engine_own", "trainer_own")
# Positions whose distribution is held in float64 at a time.
POSITIONS_AT_A_TIME = 64


@dataclass(frozen=True)
class Response:
    """One recorded response; logp_rollout is None where nobody recorded log μ."""

    problem_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logp_rollout: list[float] | None


@dataclass(frozen=True)
class Setting:
    """A model in some precision, on some device; `temperature`: of the sampling distribution."""

    folder: Path
    device: str
    precision: Precision
    temperature: float


def measure(
    engine: Setting,
    trainer: Setting,
    responses: Sequence[Response],
    parts: Sequence[Fp32Module],
    *,
    bootstrap_samples: int,
    seed: int,
    confidence: float = 0.95,
    progress: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """Trace responses to different problems. The result, where an estimate is {value, low, high}, over problems:

    responses, tokens; confidence, bootstrap_samples
    recorded_difference: the largest |log μ as recorded − log μ as computed again|; 0 on the machine that sampled
    kl, k3: nats a token; KL[μ‖π] over the vocabulary, and its estimate from the tokens alone
    operations: a row for each, in the order of the forward pass: layer (null behind the layers), operation, path, and
        estimates of root mean squares over positions, relative to the exact result: engine and trainer, the error of
        each side's state; difference, between the two; weights, of rounding the weights alone; engine_own and
        trainer_own, of the operation itself (null for the residual stream)
    parts: a row for each part in fp32 on both sides: part, kl, k3, removed (1 − kl / kl of the precision as it is)
    """
    n = len(responses)
    pair = _Pair(engine, trainer)
    places = operations(pair.trainer_model)
    references = _References(pair, trainer)
    errors = np.full((n, len(places), len(MEASURES)), np.nan)
    mismatch = np.zeros((n, 1 + len(parts), 2))
    recorded, order = 0.0, list[str]()
    for number, response in enumerate(responses):
        computed = pair.compute(response, places)
        errors[number] = references.errors(response, computed, places)
        order = list(computed.trainer)
        mismatch[number, 0] = computed.mismatch(engine.temperature)
        if response.logp_rollout is not None:
            recorded = max(recorded, float(np.abs(computed.logp_engine - np.array(response.logp_rollout)).max()))
        if progress:
            progress(1, "")
    del references, pair
    for column, part in enumerate(parts, start=1):
        changed = _Pair(_with_part(engine, part), _with_part(trainer, part))
        for number, response in enumerate(responses):
            mismatch[number, column] = changed.compute(response, places[-1:]).mismatch(engine.temperature)
            if progress:
                progress(1, f"{part} in fp32")

    tokens = np.array([len(response.token_ids) for response in responses], dtype=np.float64)
    estimates = bootstrap(
        lambda counts: _statistics(counts, tokens, errors, mismatch),
        n,
        samples=bootstrap_samples,
        seed=seed,
        confidence=confidence,
    )

    def estimate(name: str, *at: int) -> dict[str, float]:
        return Estimate(*(float(array[at]) for array in estimates[name]))._asdict()

    return {
        "responses": n,
        "tokens": int(tokens.sum()),
        "confidence": confidence,
        "bootstrap_samples": bootstrap_samples,
        "recorded_difference": recorded,
        "kl": estimate("mismatch", 0, 0),
        "k3": estimate("mismatch", 0, 1),
        "operations": [
            {
                "layer": place.layer,
                "operation": place.kind,
                "path": place.path,
                **{name: estimate("errors", row, column) for column, name in enumerate(MEASURES)},
            }
            for row, place in sorted(enumerate(places), key=lambda item: order.index(item[1].path))
        ],
        "parts": [
            {
                "part": part,
                "kl": estimate("mismatch", column, 0),
                "k3": estimate("mismatch", column, 1),
                "removed": estimate("removed", column),
            }
            for column, part in enumerate(parts, start=1)
        ],
    }


def _statistics(
    counts: FloatArray, tokens: FloatArray, errors: FloatArray, mismatch: FloatArray
) -> dict[str, FloatArray]:
    """Of resamples [R, n] of responses: from sums over positions of squared errors and of KL to means."""
    total = (counts @ tokens)[:, None, None]
    squares = np.einsum("rn,n...->r...", counts, errors) / total
    means = np.einsum("rn,n...->r...", counts, mismatch) / total
    with np.errstate(divide="ignore", invalid="ignore"):
        removed = 1 - means[:, :, 0] / means[:, :1, 0]
    return {"errors": np.sqrt(squares), "mismatch": means, "removed": removed}


def _with_part(setting: Setting, part: Fp32Module) -> Setting:
    wide = tuple(dict.fromkeys([*setting.precision.fp32_modules, part]))
    return replace(setting, precision=setting.precision.model_copy(update={"fp32_modules": wide}))


class _Pair:
    """The engine's and the trainer's model."""

    def __init__(self, engine: Setting, trainer: Setting):
        self.engine_model = _cast(engine, engine.precision.rollout)
        self.trainer_model = _cast(trainer, trainer.precision.compute)
        self.temperature = trainer.temperature

    def compute(self, response: Response, places: Sequence[Operation]) -> _Computed:
        with traced(self.engine_model, places) as engine:
            logp_engine = forced_logprobs(self.engine_model, response.prompt_ids, response.token_ids, self.temperature)
        batch = collate([response.prompt_ids], [response.token_ids], stop_token_ids=()).to(self.trainer_model.device)
        with traced(self.trainer_model, places) as trainer, torch.no_grad():
            logp_trainer = token_logprobs(self.trainer_model, batch, self.temperature)[0][0]
        return _Computed(engine, trainer, np.array(logp_engine), logp_trainer.double().cpu().numpy(), places[-1].path)


def _cast(setting: Setting, dtype: DType) -> PreTrainedModel:
    model = models.load(setting.folder, torch.float32).to(setting.device)
    cast_model(model, dtype, setting.precision.fp32_modules, setting.precision.emulate)
    return model


@dataclass(frozen=True)
class _Computed:
    """What both sides made of one response: the calls of their operations, and log μ and log π of its tokens [N]."""

    engine: dict[str, Calls]
    trainer: dict[str, Calls]
    logp_engine: FloatArray
    logp_trainer: FloatArray
    head: str

    @torch.no_grad()
    def mismatch(self, temperature: float) -> tuple[float, float]:
        """Sums over the response: KL[μ‖π] over the vocabulary, and e^d − 1 − d of its tokens."""
        d = self.logp_trainer - self.logp_engine
        k3 = float((np.expm1(d) - d).sum())
        n, kl = len(d), 0.0
        engine, trainer = (calls[self.head].result[0, -n:] for calls in (self.engine, self.trainer))
        for start in range(0, n, POSITIONS_AT_A_TIME):
            mu, pi = (
                torch.log_softmax(logits[start : start + POSITIONS_AT_A_TIME].float() / temperature, dim=-1).double()
                for logits in (engine, trainer)
            )
            kl += float((mu.exp() * (mu - pi)).nan_to_num(0.0).sum())
        return kl, k3


class _References:
    """Float64 passes of the weights that each side holds, and of the weights as they are in the folder."""

    def __init__(self, pair: _Pair, setting: Setting):
        unrounded = models.load(setting.folder, torch.float32).to(setting.device).double()
        one_expert_after_the_other(unrounded)
        self._models = {"unrounded": unrounded, "trainer": _holding(unrounded, pair.trainer_model)}
        pairs = zip(pair.engine_model.parameters(), pair.trainer_model.parameters(), strict=True)
        if not all(torch.equal(one.double(), other.double()) for one, other in pairs):
            self._models["engine"] = _holding(unrounded, pair.engine_model)

    @torch.no_grad()
    def errors(self, response: Response, computed: _Computed, places: Sequence[Operation]) -> FloatArray:
        """Sums over the positions of squared relative errors, [places, MEASURES]."""
        n = len(response.token_ids)
        exact = {side: self._states(model, response, places) for side, model in self._models.items()}
        exact.setdefault("engine", exact["trainer"])
        table = np.full((len(places), len(MEASURES)), np.nan)
        for row, place in enumerate(places):
            engine, trainer = computed.engine[place.path], computed.trainer[place.path]
            right = {side: calls[place.path].result[0, -n:] for side, calls in exact.items()}
            states = [calls.result[0, -n:].double() for calls in (engine, trainer)]
            values = [
                _squares(states[0] - right["engine"], right["engine"]),
                _squares(states[1] - right["trainer"], right["trainer"]),
                _squares(states[0] - states[1], right["trainer"]),
                _squares(right["trainer"] - right["unrounded"], right["unrounded"]),
            ]
            if place.kind != "residual":
                for side, calls in (("engine", engine), ("trainer", trainer)):
                    model = self._models.get(side, self._models["trainer"])
                    alone = self._repeat(model, place, exact[side][place.path], calls.given)[0, -n:]
                    values.append(_squares(calls.result[0, -n:].double() - alone, alone))
            table[row, : len(values)] = values
        return table

    def _states(self, model: PreTrainedModel, response: Response, places: Sequence[Operation]) -> dict[str, Calls]:
        tokens = torch.tensor([[*response.prompt_ids, *response.token_ids[:-1]]], device=model.device)
        with traced(model, places) as calls, InFloat64():
            model(input_ids=tokens, use_cache=False, logits_to_keep=len(response.token_ids))
        return calls

    def _repeat(self, model: PreTrainedModel, place: Operation, calls: Calls, given: torch.Tensor) -> torch.Tensor:
        with InFloat64():
            return calls.repeat(model.get_submodule(place.path), given.double())


def _holding(exact: PreTrainedModel, held: PreTrainedModel) -> PreTrainedModel:
    """A copy of the float64 model with the weights of another."""
    copy = deepcopy(exact)
    weights = dict(held.named_parameters())
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(weights[name])
    return copy


def _squares(error: torch.Tensor, exact: torch.Tensor) -> float:
    """Σ over positions [N, ·] of |error|² / |exact|²."""
    return float((error.square().sum(-1) / exact.square().sum(-1)).sum())
