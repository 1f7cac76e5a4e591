"""What to make of a training log while it grows: collapse and its early warnings are recorded, a run that cannot go on
ends. docs/monitors.md has the rules.

Everything here is a function of the rows so far, so a resumed run is judged as an uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfmatch.errors import UserError
from halfmatch.rl import early_warnings

Row = Mapping[str, Any]

# Optimizer steps that the share of skipped ones is taken over.
SKIP_WINDOW = 50
# Optimizer steps in which the weights have to move. A loss scale of 65,536 takes 16 of them to back off to 1.
FIRST_STEPS = 20
# Iterations that a reward is averaged over before it is compared with the best such mean.
REWARD_WINDOW = 10
# A mean reward below this share of the best one is a collapse.
COLLAPSE_SHARE = 0.5
# A mismatch (k3, nats a token) that is this many times its usual value and above the floor: the policy breaks, or the
# engine serves other weights than it was given. The rollouts right after a sync, scored by both sides, are its probe.
MISMATCH_GROWTH = 20.0
MISMATCH_FLOOR = 1e-3
# What the names of a value model's columns begin with, where the policy has some of the same name.
CRITIC = "critic_"


@dataclass(frozen=True)
class Limits:
    """When a run ends: the share of skipped steps, a collapse or not; and the loss scale that cannot fall further."""

    max_skip_share: float
    stop_at_collapse: bool
    min_scale: float | None


@dataclass(frozen=True)
class Event:
    """What the newest row of a log shows, for its column `event`."""

    message: str
    stop: bool


def check(rows: Sequence[Row], limits: Limits) -> Event | None:
    """Judge the newest row. Every kind of collapse or warning is reported once, where it shows first; one a row, the
    worst first.

    A run whose weights did not move in its first steps has learned nothing: its settings are wrong (UserError). A run
    that breaks later is a result: the log says so, and the run ends where too many steps are skipped, or at a collapse
    if the settings ask for it. A warning never ends a run.
    """
    _require_movement(rows)
    window, newest = rows[-SKIP_WINDOW:], rows[-1]
    for whose, prefix in (("", ""), ("critic's ", CRITIC)):
        share = skip_share(window, prefix)
        if len(window) == SKIP_WINDOW and share > limits.max_skip_share:
            culprit = _culprit(window, prefix)
            return Event(
                f"stopped: {share:.0%} of the last {SKIP_WINDOW} {whose}steps were skipped{culprit}", stop=True
            )
    for kind, symptom in (
        ("loss", _loss(newest, "loss")),
        ("gradient", _gradient(newest, limits.min_scale)),
        ("value loss", _loss(newest, "value_loss", CRITIC)),
        ("critic's gradient", _gradient(newest, limits.min_scale, CRITIC)),
        ("reward", _reward(rows)),
        ("match with the engine", _mismatch(rows)),
    ):
        if symptom and not _reported(rows, prefix := f"collapse of the {kind}: "):
            return Event(prefix + symptom, stop=limits.stop_at_collapse)
    for signal, finding in early_warnings.crossed(rows):
        if not _reported(rows, prefix := f"warning, {signal}: "):
            return Event(prefix + finding, stop=False)
    return None


def _reported(rows: Sequence[Row], prefix: str) -> bool:
    return any((row["event"] or "").startswith(prefix) for row in rows[:-1])


def skip_share(rows: Sequence[Row], prefix: str = "") -> float:
    """Skipped of all steps."""
    return sum(bool(row.get(f"{prefix}step_skipped")) for row in rows) / len(rows)


def _require_movement(rows: Sequence[Row]) -> None:
    newest = rows[-1]
    if len(rows) != FIRST_STEPS or newest["learning_rate"] == 0 or newest["weight_change"] != 0:
        return
    skipped, flat = sum(row["step_skipped"] for row in rows), sum(row["gradient_norm"] == 0 for row in rows)
    raise UserError(
        f"step {newest['step']}: the weights have not changed yet. {skipped} of {len(rows)} steps were skipped for "
        f"gradients that are not finite{_culprit(rows)}, {flat} had a gradient of 0, as where all responses to a "
        f"problem get the same reward (the mean is {newest['reward']:g})"
    )


def _culprit(rows: Sequence[Row], prefix: str = "") -> str:
    """The first tensor that was not finite, of those found in the rows."""
    column = f"{prefix}first_non_finite"
    found = next((row for row in rows if row.get(column)), None)
    return f" (first at step {found['step']}: {found[column]})" if found else ""


def _loss(newest: Row, column: str, prefix: str = "") -> str | None:
    loss = newest.get(column)
    return None if loss is None or math.isfinite(loss) else f"it is {loss}{_culprit([newest], prefix)}"


def _gradient(newest: Row, min_scale: float | None, prefix: str = "") -> str | None:
    """An overflow that no loss scale explains: there is none, or it is as low as it may be."""
    scale = newest.get(f"{prefix}loss_scale")
    explained = scale is not None and min_scale is not None and scale > min_scale
    if not newest.get(f"{prefix}step_skipped") or explained:
        return None
    at = "" if scale is None else f" at the lowest loss scale, {scale:g}"
    return f"it is not finite{at}{_culprit([newest], prefix)}"


def _reward(rows: Sequence[Row]) -> str | None:
    by_iteration = {row["iteration"]: row["reward"] for row in rows}
    rewards = [reward for reward in by_iteration.values() if math.isfinite(reward)]
    means = [
        sum(rewards[start : start + REWARD_WINDOW]) / REWARD_WINDOW for start in range(len(rewards) - REWARD_WINDOW + 1)
    ]
    if not means or means[-1] >= COLLAPSE_SHARE * max(means):
        return None
    return f"it fell to {means[-1]:.3f} from {max(means):.3f} (means of {REWARD_WINDOW} iterations)"


def _mismatch(rows: Sequence[Row]) -> str | None:
    newest = rows[-1]["k3"]
    earlier = [row["k3"] for row in rows[:-1] if row["k3"] is not None and math.isfinite(row["k3"])]
    if newest is None or not earlier:
        return None
    usual = statistics.median(earlier)
    if newest <= max(MISMATCH_GROWTH * usual, MISMATCH_FLOOR):
        return None
    return (
        f"k3 is {newest:.2g} nats a token where it was {usual:.2g} (median); the policy breaks, or the engine is stale"
    )
