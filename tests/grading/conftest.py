from __future__ import annotations

import pytest

from halfmatch.grading import Grader


@pytest.fixture(scope="session")
def boxed():
    """A grader whose process all tests share."""
    with Grader("boxed", timeout_s=20) as grader:
        yield grader
