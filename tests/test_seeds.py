"""Seeds are stable names, uniforms a function of seed and position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.seeds import request_seed, uniforms


def test_request_seed_is_the_head_of_a_sha256():
    # printf '[0, "7×8", 3]' | sha256sum | cut -c1-16, its top bit dropped by a shift
    assert request_seed(0, "7×8", 3) == 0xBA1CAB3CEB0FF9E1 >> 1
    assert request_seed(1, "a", 0, "evaluation", 5) == 0x91753F035044691A >> 1


def test_request_seeds_differ_in_every_part():
    seeds = {
        request_seed(base, problem, sample, *more)
        for base in (0, 1)
        for problem in ("1", "11", "")
        for sample in (0, 1, 11)
        for more in ((), (0,), ("0",), (0, 1))
    }
    assert len(seeds) == 2 * 3 * 3 * 4


@given(st.integers(0, 2**63 - 1), st.integers(0, 100), st.integers(0, 100))
def test_a_uniform_depends_on_seed_and_position_alone(seed, short, more):
    long = uniforms(seed, short + more)
    np.testing.assert_array_equal(uniforms(seed, short), long[:short])
    assert ((long >= 0) & (long < 1)).all()


def test_uniforms_are_those_of_numpys_philox():
    bits = np.random.Philox(key=12345).random_raw(4)
    np.testing.assert_array_equal(uniforms(12345, 4), (bits >> np.uint64(11)) * 2.0**-53)


def test_other_seeds_give_other_uniforms():
    assert len({uniforms(seed, 1)[0] for seed in range(100)}) == 100
