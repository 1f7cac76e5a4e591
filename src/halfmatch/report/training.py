"""What the report makes of training logs: a value an iteration, running means, bands over seeds, collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from halfmatch import artifacts
from halfmatch.paths import Run
from halfmatch.rl.monitors import REWARD_WINDOW
from halfmatch.statistics import Estimate, t_interval

Floats = npt.NDArray[np.float64]

WINDOW = REWARD_WINDOW  # iterations that a running mean covers
SEEDS_FOR_INTERVAL = 5  # below, a band shows the extremes and claims nothing

# How the rows of an iteration (one an optimizer step) become one value. Columns that stand in the first row alone, or
# are the same in all, are the mean of what is there.
_LAST = ("loss_scale", "skip_share")


@dataclass(frozen=True)
class TrainingRun:
    """One run of the matrix, by iteration."""

    name: Run
    iterations: int  # that the log holds
    planned: int  # that the configuration asks for
    series: Mapping[str, Floats]
    events: Sequence[tuple[int, str]]  # (optimizer step, what a monitor said)

    @cached_property
    def reward(self) -> Floats:
        """Running mean of the reward."""
        return running_mean(self.series["reward"])

    @property
    def final_reward(self) -> float:
        return float(self.reward[-1])

    def final_estimate(self, confidence: float) -> Estimate:
        """The final reward with its interval over the iterations of the window, each of which draws anew."""
        window = self.series["reward"][-WINDOW:]
        return Estimate(self.final_reward, *t_interval(window[~np.isnan(window)], confidence))

    @property
    def best_reward(self) -> float:
        """Of running means over whole windows."""
        return float(np.nanmax(self.reward[min(WINDOW, self.iterations) - 1 :]))

    @property
    def mean_reward(self) -> float:
        """Over the whole run: of two runs that end alike, the one that got there sooner has more."""
        return float(np.nanmean(self.series["reward"]))

    @property
    def collapsed(self) -> bool:
        """Whether a monitor has said so, or has ended the run; see halfmatch.rl.monitors."""
        return any(event.startswith(("collapse", "stopped")) for _, event in self.events)


def read(path: Path, name: Run, planned: int) -> TrainingRun:
    """Read a training log."""
    table = artifacts.read(path, "training_log")
    iteration = table["iteration"].to_numpy()
    starts = np.flatnonzero(np.diff(iteration, prepend=iteration[0] - 1)) if len(iteration) else np.zeros(0, int)
    series: dict[str, Floats] = {}
    for field in table.schema:
        if str(field.type) in ("double", "bool"):
            column = table[field.name].cast("double").to_numpy(zero_copy_only=False)
            rows = np.split(column, starts[1:])
            series[field.name] = np.array([_one(values, last=field.name in _LAST) for values in rows if len(values)])
    series["largest_prob_diff"] = np.fmax(np.abs(series["max_prob_diff"]), np.abs(series["min_prob_diff"]))
    events = [
        (step, event)
        for step, event in zip(table["step"].to_pylist(), table["event"].to_pylist(), strict=True)
        if event is not None
    ]
    return TrainingRun(name, len(starts), planned, series, events)


def _one(values: Floats, *, last: bool) -> float:
    present = values[~np.isnan(values)]
    if not len(present):
        return math.nan
    return float(present[-1] if last else present.mean())


def running_mean(values: Floats, window: int = WINDOW) -> Floats:
    """Mean of the last `window` values at each place, of fewer at the start; NaNs do not count."""
    present = ~np.isnan(values)
    total = np.cumsum(np.where(present, values, 0.0))
    count = np.cumsum(present)
    before = np.maximum(np.arange(len(values)) - window, -1)
    total_before = np.where(before >= 0, total[before], 0.0)
    count_before = np.where(before >= 0, count[before], 0)
    number = count - count_before
    return np.divide(total - total_before, number, out=np.full(len(values), math.nan), where=number > 0)


@dataclass(frozen=True)
class Band:
    """The seeds of one precision and objective together, as far as the shortest of them got."""

    mean: Floats
    low: Floats
    high: Floats
    is_interval: bool  # of the mean; else the extremes of the seeds


def band(curves: Sequence[Floats], confidence: float) -> Band:
    """Mean and band of one curve a seed: extremes for a few seeds, Student's interval for five and more."""
    length = min(len(curve) for curve in curves)
    values = np.stack([curve[:length] for curve in curves])
    if len(curves) < SEEDS_FOR_INTERVAL:
        return Band(values.mean(axis=0), values.min(axis=0), values.max(axis=0), False)
    bounds = np.array([t_interval(column, confidence) for column in values.T]).reshape(length, 2)
    return Band(values.mean(axis=0), bounds[:, 0], bounds[:, 1], True)
