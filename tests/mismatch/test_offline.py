"""The offline analysis against plain formulas over all responses at once, and where there is too little of them."""

import csv
import math

import numpy as np
import pytest

from halfmatch import artifacts
from halfmatch.errors import UserError
from halfmatch.mismatch import offline
from halfmatch.mismatch.metrics import sequence_metrics, token_metrics
from halfmatch.mismatch.offline import analyse, curves, write_curves

SETTINGS = {"bootstrap_samples": 200, "seed": 0, "confidence": 0.95}


def rows_of(problems):
    """Rows of a scores table from {problem_id: [(log π, log μ) of a response]}."""
    return [
        {
            "problem_id": problem_id,
            "sample": sample,
            "token_ids": [7] * len(rollout),
            "logp_rollout": np.asarray(rollout, dtype=np.float32),
            "logp_train": np.asarray(train, dtype=np.float32),
        }
        for problem_id, responses in problems.items()
        for sample, (train, rollout) in enumerate(responses)
    ]


def scores(path, problems):
    artifacts.write(path, "scores", rows_of(problems), {"step": "scores"})
    return path


def random_problems(seed=0, problems=12, samples=3, longest=150, scale=0.1, prefix="p"):
    rng = np.random.default_rng(seed)

    def response():
        rollout = -rng.exponential(1, rng.integers(1, longest))
        return (rollout + scale * rng.normal(size=len(rollout)) - scale**2 / 2).astype(np.float32), rollout.astype(
            np.float32
        )

    return {f"{prefix}{number:03d}": [response() for _ in range(samples)] for number in range(problems)}


def padded(problems, start=0, stop=None):
    """All responses as one batch: log π, log μ, mask; optionally the tokens of a range of positions only."""
    pairs = [
        (train[start:stop], rollout[start:stop]) for responses in problems.values() for train, rollout in responses
    ]
    width = max(len(rollout) for _, rollout in pairs)
    train, rollout, mask = (
        np.zeros((len(pairs), width)),
        np.zeros((len(pairs), width)),
        np.zeros((len(pairs), width), bool),
    )
    for row, (a, b) in enumerate(pairs):
        train[row, : len(a)], rollout[row, : len(b)], mask[row, : len(b)] = a, b, True
    return train, rollout, mask


@pytest.fixture
def problems():
    return random_problems()


def test_metrics_are_those_of_one_padded_batch(tmp_path, problems):
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    expected = token_metrics(*padded(problems)) | sequence_metrics(*padded(problems))
    for name in ("tokens", "sequences", "non_finite_tokens", "non_finite_sequences"):
        assert analysis[name] == expected.pop(name)
    values = {name: estimate["value"] for name, estimate in analysis["metrics"].items()}
    assert values == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_positions_are_buckets_that_double(tmp_path, problems):
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    assert [(row["start"], row["stop"]) for row in analysis["positions"]] == [
        (0, 16),
        (16, 32),
        (32, 64),
        (64, 128),
        (128, 256),
    ]
    for row in analysis["positions"]:
        expected = token_metrics(*padded(problems, row["start"], row["stop"]))
        assert row["tokens"] == expected["tokens"]
        for name in ("k1", "k3", "mean_abs_prob_diff", "share_above_0.1"):
            assert row[name]["value"] == pytest.approx(expected[name], rel=1e-9, abs=1e-12)
    assert sum(row["tokens"] for row in analysis["positions"]) == analysis["tokens"]


def test_the_law_at_a_length_is_of_the_responses_that_reach_it_cut_there(tmp_path, problems):
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    assert [row["length"] for row in analysis["lengths"]] == [16, 32, 64, 128]
    for row in analysis["lengths"]:
        length = row["length"]
        long_enough = {
            problem: [pair for pair in responses if len(pair[0]) >= length] for problem, responses in problems.items()
        }
        expected = sequence_metrics(*padded(long_enough, 0, length))
        assert row["sequences"] == expected["sequences"]
        for name in (
            *("kl_sequence", "sigma", "sigma_predicted", "sigma_tokens", "sigma_slack"),
            *("ess", "ess_share", "ess_share_predicted"),
        ):
            assert row[name]["value"] == pytest.approx(expected[name], rel=1e-9, abs=1e-12)


def test_autocorrelation_and_batch_means_against_plain_loops(tmp_path, problems):
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    ds = [np.float64(train) - np.float64(rollout) for responses in problems.values() for train, rollout in responses]
    for row in analysis["autocorrelation"]:
        lag = row["lag"]
        pairs = np.array([(d[t], d[t + lag]) for d in ds for t in range(len(d) - lag)])
        assert row["pairs"] == len(pairs)
        assert row["correlation"]["value"] == pytest.approx(np.corrcoef(pairs.T)[0, 1], abs=1e-9)
    mean_length = np.mean([len(d) for d in ds])
    for row in analysis["batch_means"]:
        size = row["tokens"]
        sums = [d[start : start + size].sum() for d in ds for start in range(0, len(d) - size + 1, size)]
        variance = np.var(sums, ddof=1) / size
        assert row["batches"] == len(sums)
        assert row["variance_per_token"]["value"] == pytest.approx(variance)
        assert row["sigma_predicted"]["value"] == pytest.approx(math.sqrt(variance * mean_length))


def test_correlated_errors_show_in_the_long_run_variance(tmp_path):
    """d an AR(1) process with coefficient 0.8: long-run variance is (1 + 0.8) / (1 − 0.8) = 9 times the variance."""
    rng = np.random.default_rng(0)
    problems = {}
    for number in range(40):
        noise, d = 0.01 * rng.normal(size=2048), np.zeros(2048)
        for t in range(1, 2048):
            d[t] = 0.8 * d[t - 1] + noise[t]
        problems[f"p{number:02d}"] = [(d - 2, np.full(2048, -2.0))]
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    variances = {row["tokens"]: row["variance_per_token"]["value"] for row in analysis["batch_means"]}
    exact_64 = (1 + 2 * sum((1 - lag / 64) * 0.8**lag for lag in range(1, 64))) * variances[1]
    assert variances[64] == pytest.approx(exact_64, rel=0.1)
    assert analysis["autocorrelation"][0]["correlation"]["value"] == pytest.approx(0.8, abs=0.01)
    by_law, by_batches = analysis["metrics"]["sigma_predicted"]["value"], analysis["batch_means"][-1]["sigma_predicted"]
    assert by_batches["value"] / by_law == pytest.approx(3, rel=0.1)


def test_intervals_hold_the_value_and_narrow_with_more_problems(tmp_path):
    few = analyse(scores(tmp_path / "few.parquet", random_problems(problems=8)), **SETTINGS)["metrics"]
    many = analyse(scores(tmp_path / "many.parquet", random_problems(problems=128)), **SETTINGS)["metrics"]
    for name in ("k1", "k3", "sigma", "kl_sequence", "ess_share", "mean_abs_prob_diff"):
        for metrics in (few, many):
            assert metrics[name]["low"] <= metrics[name]["value"] <= metrics[name]["high"]
        width = [metrics[name]["high"] - metrics[name]["low"] for metrics in (few, many)]
        assert width[1] < 0.6 * width[0]
    assert math.isnan(few["max_prob_diff"]["low"])


def test_interval_of_k3_is_the_bootstrap_over_problems_done_by_hand(tmp_path, problems):
    """The same counts, each resample evaluated on its own responses: no sufficient statistics."""
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    draws = []
    for counts in np.random.default_rng(0).multinomial(len(problems), [1 / len(problems)] * len(problems), size=200):
        resample = {
            f"{problem}/{copy}": responses
            for (problem, responses), count in zip(problems.items(), counts, strict=True)
            for copy in range(count)
        }
        sample = padded(resample)
        draws.append(
            (token_metrics(*sample)["k3"], sequence_metrics(*sample)["sigma"], sequence_metrics(*sample)["ess_share"])
        )
    for column, name in enumerate(("k3", "sigma", "ess_share")):
        low, high = np.quantile([draw[column] for draw in draws], [0.025, 0.975])
        assert analysis["metrics"][name]["low"] == pytest.approx(low)
        assert analysis["metrics"][name]["high"] == pytest.approx(high)


def test_a_collapse_of_thousands_of_nats_is_measured(tmp_path):
    rng = np.random.default_rng(0)
    problems = {
        f"p{number}": [(-rng.exponential(20, 300), -rng.exponential(1, 300)) for _ in range(2)] for number in range(6)
    }
    metrics = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)["metrics"]
    assert metrics["kl_sequence"]["value"] > 3000
    assert metrics["ess"]["value"] == pytest.approx(1)
    assert metrics["ess"]["low"] >= 1
    assert math.isfinite(metrics["ess_share"]["high"])


def test_one_table_or_several_row_groups_or_files_are_the_same(tmp_path, monkeypatch, problems):
    whole = analyse(scores(tmp_path / "whole.parquet", problems), **SETTINGS)
    names = list(problems)
    # the last problem of the first file goes on in the second
    split = {name: problems[name] for name in names[:4]} | {names[4]: problems[names[4]][:1]}
    first = scores(tmp_path / "1.parquet", split)
    second = scores(
        tmp_path / "2.parquet", {names[4]: problems[names[4]][1:]} | {name: problems[name] for name in names[5:]}
    )
    assert flat(analyse([first, second], **SETTINGS)) == pytest.approx(flat(whole), rel=1e-9, abs=1e-12, nan_ok=True)
    monkeypatch.setattr(artifacts, "ROWS_A_GROUP", 2)
    grouped = scores(tmp_path / "grouped.parquet", problems)
    assert artifacts.open_table(grouped, "scores").num_row_groups > 5
    assert flat(analyse(grouped, **SETTINGS)) == pytest.approx(flat(whole), rel=1e-9, abs=1e-12, nan_ok=True)


def test_pieces_of_any_size_are_the_same(tmp_path, monkeypatch, problems):
    path = scores(tmp_path / "scores.parquet", {**problems, "zempty": [([], []), ([-1.0, -2.0], [-1.5, -1.0])]})
    whole = analyse(path, **SETTINGS)
    for tokens in (1, 100):
        monkeypatch.setattr(offline, "TOKENS_A_PIECE", tokens)
        assert flat(analyse(path, **SETTINGS)) == pytest.approx(flat(whole), rel=1e-9, abs=1e-12, nan_ok=True)


def test_of_many_problems_groups_are_resampled(tmp_path, monkeypatch):
    problems = random_problems(problems=40)
    path = scores(tmp_path / "scores.parquet", problems)
    alone = analyse(path, **SETTINGS)
    monkeypatch.setattr(offline, "MAX_UNITS", 10)
    grouped = analyse(path, **SETTINGS)
    assert grouped["problems"] == 40
    for name, estimate in alone["metrics"].items():
        assert grouped["metrics"][name]["value"] == pytest.approx(estimate["value"], rel=1e-9)
    by_hand = {f"g{unit}": [pair for name in list(problems)[unit::10] for pair in problems[name]] for unit in range(10)}
    expected = analyse(scores(tmp_path / "by_hand.parquet", by_hand), **SETTINGS)
    for name in ("k3", "sigma", "ess_share"):
        assert grouped["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-9)
    assert grouped["metrics"]["k3"]["low"] != alone["metrics"]["k3"]["low"]


def flat(value, name=""):
    if isinstance(value, dict):
        return {key: number for part, item in value.items() for key, number in flat(item, f"{name}/{part}").items()}
    if isinstance(value, list):
        return {key: number for part, item in enumerate(value) for key, number in flat(item, f"{name}/{part}").items()}
    return {name: math.nan if value is None else value}


def test_the_same_input_gives_the_same_numbers(tmp_path, problems):
    path = scores(tmp_path / "scores.parquet", problems)
    artifacts.write_json(tmp_path / "a.json", analyse(path, **SETTINGS), {})
    artifacts.write_json(tmp_path / "b.json", analyse(path, **SETTINGS), {})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    "problems",
    [
        {"p": [([-1.0], [-1.5])]},
        {"p": [([-1.0, -2.0], [-1.5, -1.0])] * 3},
        {"p": [([], [])], "q": [([-1.0], [-1.5])]},
        {"p": [([], [])]},
        {"p": [([math.nan], [-1.0])]},
        {"p": [([-1.0], [-1.0])], "q": [([-1.0], [-1.0])]},
    ],
    ids=["one token", "one problem", "an empty response", "only an empty one", "only non-finite", "no mismatch"],
)
def test_too_little_data_gives_null_and_no_error(tmp_path, problems):
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    artifacts.write_json(tmp_path / "mismatch.json", analysis, {})
    write_curves(tmp_path / "curves.csv", curves(analysis))
    written = artifacts.read_json(tmp_path / "mismatch.json")
    assert written["problems"] == len(problems)
    if len(problems) == 1:
        assert all(estimate["low"] is None for estimate in written["metrics"].values())


def test_non_finite_responses_count_and_their_finite_tokens_stay(tmp_path, problems):
    clean = analyse(scores(tmp_path / "clean.parquet", problems), **SETTINGS)
    bad = dict(problems)
    train, rollout = np.float32([-1.0, math.nan, -math.inf]), np.float32([-1.0, -1.0, -1.0])
    bad["p000"] = [*problems["p000"], (train, rollout)]
    analysis = analyse(scores(tmp_path / "bad.parquet", bad), **SETTINGS)
    assert (analysis["non_finite_sequences"], analysis["non_finite_tokens"]) == (1, 2)
    assert analysis["tokens"] == clean["tokens"] + 1
    assert analysis["sequences"] == clean["sequences"]
    for name in ("sigma", "kl_sequence", "ess", "slope_per_1k"):
        assert analysis["metrics"][name]["value"] == pytest.approx(clean["metrics"][name]["value"])
    assert analysis["autocorrelation"] == clean["autocorrelation"]
    assert analysis["batch_means"] == clean["batch_means"]


def test_a_table_without_rows_is_refused(tmp_path):
    with pytest.raises(UserError, match="no responses to measure"):
        analyse(scores(tmp_path / "scores.parquet", {}), **SETTINGS)


def test_curves_are_the_numbers_of_the_analysis(tmp_path, problems):
    analysis = analyse(scores(tmp_path / "scores.parquet", problems), **SETTINGS)
    write_curves(tmp_path / "curves.csv", curves(analysis))
    with open(tmp_path / "curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    at = {(row["curve"], int(row["x"])): row for row in rows}
    assert len(at) == len(rows)
    law = analysis["lengths"][1]
    assert float(at["sigma", 32]["value"]) == law["sigma"]["value"]
    assert float(at["log_ratio", 32]["low"]) == -law["kl_sequence"]["high"]
    assert float(at["k3", 16]["high"]) == analysis["positions"][1]["k3"]["high"]
    assert float(at["autocorrelation", 4]["value"]) == analysis["autocorrelation"][2]["correlation"]["value"]
    assert rows == sorted(rows, key=lambda row: (row["curve"], int(row["x"])))
