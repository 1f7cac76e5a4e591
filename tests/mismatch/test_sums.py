"""Sums of responses against plain loops over them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.mismatch.sums import BATCHES, BUCKETS, CUTS, EDGES, LAGS, Sums

d_values = st.floats(-0.5, 0.5) | st.sampled_from([0.0, math.nan, math.inf])
responses = st.lists(
    st.tuples(st.integers(0, 2), st.lists(d_values, max_size=40) | st.integers(60, 140).map(lambda n: [0.01] * n)),
    min_size=1,
    max_size=6,
)


def added(pairs, sums=None):
    sums = sums or Sums(units=3)
    d = np.concatenate([np.asarray(one, dtype=np.float64) for _, one in pairs])
    rollout = np.full(len(d), -1.0)
    lengths = np.array([len(one) for _, one in pairs])
    sums.add(np.array([unit for unit, _ in pairs]), lengths, rollout + d, rollout)
    return sums


def exact(pairs, unit):
    """The same of one unit: d as it comes out of (d − 1) − (−1), in loops."""
    mine = [[(value - 1.0) + 1.0 for value in one] for other, one in pairs if other == unit]
    finite = [one for one in mine if one and all(map(math.isfinite, one))]
    sums = {"non_finite_sequences": [sum(bool(one) and not all(map(math.isfinite, one)) for one in mine)]}
    buckets = [
        [
            value
            for one in mine
            for value in one[start : EDGES[bucket + 1] if bucket + 1 < BUCKETS else None]
            if math.isfinite(value)
        ]
        for bucket, start in enumerate(EDGES)
    ]
    sums["position.d"] = [sum(values) for values in buckets]
    sums["position.tokens"] = [len(values) for values in buckets]
    sums["position.k3"] = [sum(math.expm1(value) - value for value in values) for values in buckets]
    cut = [[one[:length] for one in finite if len(one) >= length] for length in CUTS] + [finite]
    sums["sequence.sequences"] = [len(whole) for whole in cut]
    sums["sequence.log_ratio_squared"] = [sum(sum(one) ** 2 for one in whole) for whole in cut]
    sums["sequence.length"] = [sum(len(one) for one in whole) for whole in cut]
    sums["log_weights"] = [math.log(math.fsum(math.exp(sum(one)) for one in w)) if w else -math.inf for w in cut]
    for name, term in (
        ("n", lambda x, y: 1),
        ("x", lambda x, y: x),
        ("yy", lambda x, y: y * y),
        ("xy", lambda x, y: x * y),
    ):
        sums[f"lag.{name}"] = [
            sum(term(x, y) for one in finite for x, y in zip(one[:-lag], one[lag:], strict=True)) for lag in LAGS
        ]
    totals = [[sum(one[i : i + s]) for one in finite for i in range(0, len(one) - s + 1, s)] for s in BATCHES]
    sums["batch.n"] = [len(batches) for batches in totals]
    sums["batch.sum"] = [sum(batches) for batches in totals]
    sums["batch.squares"] = [sum(total**2 for total in batches) for batches in totals]
    return sums


@given(responses)
def test_sums_of_any_responses(pairs):
    sums = added(pairs)
    for unit in range(3):
        expected = exact(pairs, unit)
        log_weights = expected.pop("log_weights")
        for name, columns in expected.items():
            assert sums.additive[name][unit] == pytest.approx(columns, rel=1e-9, abs=1e-12), name
        assert sums.log_weights[unit, 0] == pytest.approx(log_weights, rel=1e-9, abs=1e-12)


@given(responses, responses)
def test_what_is_added_one_after_the_other_is_what_is_added_at_once(first, second):
    once, twice = added([*first, *second]), added(second, added(first))
    for name, total in once.additive.items():
        assert twice.additive[name] == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert twice.log_weights == pytest.approx(once.log_weights, rel=1e-9, abs=1e-12)
    assert (twice.largest, twice.smallest) == pytest.approx((once.largest, once.smallest), nan_ok=True)
