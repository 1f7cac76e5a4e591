"""The panels' histograms against counting token by token."""

import numpy as np
import pytest

from halfmatch import artifacts
from halfmatch.report.scores import DIFFERENCE_BINS, gather


def write(path, responses):
    rows = [
        {
            "problem_id": "p",
            "sample": sample,
            "token_ids": [1] * len(rollout),
            "logp_rollout": np.asarray(rollout, np.float32),
            "logp_train": np.asarray(train, np.float32),
        }
        for sample, (rollout, train) in enumerate(responses)
    ]
    artifacts.write(path, "scores", rows, {})
    return path


def test_each_token_is_counted_where_it_belongs(tmp_path):
    halves, quarters = np.log(0.505), np.log(0.255)
    panels = gather(write(tmp_path / "scores.parquet", [([halves, quarters], [quarters, quarters]), ([halves], [0.0])]))
    counts = np.zeros((100, 100), int)
    counts[50, 25] = counts[25, 25] = counts[50, 99] = 1
    np.testing.assert_array_equal(panels.probabilities, counts)
    assert panels.zeros == 1
    assert panels.differences.sum() == 2
    for size in (halves - quarters, -halves):
        assert panels.differences[np.searchsorted(DIFFERENCE_BINS, size) - 1] >= 1
    assert panels.lengths.tolist() == [2, 1]
    assert panels.tokens == 3
    assert panels.log_ratios == pytest.approx([quarters - halves, -halves], abs=1e-6)


def test_sums_do_not_depend_on_row_groups(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    responses = [tuple(-rng.exponential(size=(2, rng.integers(1, 9)))) for _ in range(50)]
    whole = gather(write(tmp_path / "whole.parquet", responses))
    monkeypatch.setattr(artifacts, "ROWS_A_GROUP", 7)
    pieces = gather(write(tmp_path / "pieces.parquet", responses))
    np.testing.assert_array_equal(whole.log_ratios, pieces.log_ratios)
    np.testing.assert_array_equal(whole.probabilities, pieces.probabilities)
    assert artifacts.open_table(tmp_path / "pieces.parquet", "scores").num_row_groups == 8


def test_an_empty_response_and_an_empty_table(tmp_path):
    panels = gather(write(tmp_path / "scores.parquet", [([], []), ([-1.0], [-1.5])]))
    assert panels.lengths.tolist() == [0, 1]
    assert panels.log_ratios == pytest.approx([0, -0.5])
    assert gather(write(tmp_path / "empty.parquet", [])).tokens == 0


def test_a_token_that_the_trainer_rules_out_does_not_stop_the_report(tmp_path):
    panels = gather(write(tmp_path / "scores.parquet", [([-1.0, -1.0], [-np.inf, -1.0]), ([-1.0], [np.nan])]))
    assert panels.log_ratios[0] == -np.inf
    assert panels.probabilities.sum() == 2
    assert panels.differences.sum() == 1  # the infinite one, in the last bin
