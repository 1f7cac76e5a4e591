"""Where randomness comes from: seeds that a request carries with it, and the uniforms drawn from them."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray


def request_seed(base: int, problem_id: str, sample: int, *more: int | str) -> int:
    """The seed of one request, in [0, 2^63): SHA-256 of what names the request, so neither order nor batch matters.

    `more` tells apart requests that share the rest, such as the iteration of a training run.
    """
    name = json.dumps([base, problem_id, sample, *more], ensure_ascii=False).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """The first `count` uniforms in [0, 1) of a request: the value at a position depends on the seed and it alone."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)
