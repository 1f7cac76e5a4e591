"""The headline says the artefacts' numbers, and no more than they do."""

import dataclasses
import json
from pathlib import Path

import pytest

from halfmatch.errors import UserError
from halfmatch.paths import Paths
from halfmatch.report.headline import headline, headline_text, sentence, table
from halfmatch.statistics import t_interval


def analysis_of(config, model, precision):
    names = {"model": model, "problems": "all", "engine": "transformers", "rollout": precision, "train": precision}
    return json.loads(Paths(Path(config.output)).of("mismatch", **names).read_text())["metrics"]


def with_k3(results, k3):
    """The same results with other estimates of k3, by precision."""
    cells = []
    for cell in results.cells:
        value, low, high = k3[cell.precision]
        metrics = {**cell.analysis["metrics"], "k3": {"value": value, "low": low, "high": high}}
        cells.append(dataclasses.replace(cell, analysis={**cell.analysis, "metrics": metrics}))
    return dataclasses.replace(results, cells=cells)


def test_numbers_are_those_of_the_artefacts(finished, results):
    numbers = headline(results, {"k3-ratio": "reproduced"})
    for model in ("gain16", "gain120"):
        for precision in ("bf16", "fp16"):
            metrics, shown = analysis_of(finished, model, precision), numbers["mismatch"][model][precision]
            for name in ("k3", "sigma", "sigma_predicted", "ess_share", "usable_length"):
                assert shown[name] == metrics[name]
            assert shown["cosine"]["pg"]["value"] == (0.95 if precision == "bf16" else 0.9995)
    assert numbers["claims"] == {"k3-ratio": "reproduced"}
    assert numbers["missing"] == 0


def test_training_is_summed_up_by_objective_and_precision(results):
    training = headline(results, {})["training"]
    assert training.keys() == {"grpo", "pg-seq-is"}
    runs = results.training_runs("fp16", "grpo")
    assert len(runs) == 3
    for name, values in {
        "final_reward": [run.series["reward"][-10:].mean() for run in runs],
        "mean_reward": [run.series["reward"].mean() for run in runs],
    }.items():
        low, high = t_interval(values)
        assert training["grpo"]["fp16"].pop(name) == pytest.approx({"value": sum(values) / 3, "low": low, "high": high})
    assert training["grpo"]["fp16"] == {"runs": 3, "collapsed": 0}


def test_text_has_a_line_for_every_cell_with_its_numbers(finished, results):
    lines = headline_text(headline(results, {})).splitlines()
    rows = [line for line in lines if " bf16 " in line or " fp16 " in line]
    assert [row.split()[0] for row in rows] == ["gain16", "fp16", "gain120", "fp16"] * 3  # mismatch, σ, gradients
    assert all(row.count("[") >= 2 for row in rows), "every number has its interval"
    for row, (model, precision) in zip(rows, (("gain16", "bf16"), ("gain16", "fp16")), strict=False):
        k3 = analysis_of(finished, model, precision)["k3"]["value"]
        assert float(row.split(precision)[1].split()[0]) == pytest.approx(k3, rel=5e-3)
    assert max(map(len, lines)) <= 100


def test_text_survives_json(results):
    numbers = headline(results, {})
    assert headline_text(json.loads(json.dumps(numbers, sort_keys=True))).splitlines()[1].startswith("gain16 ")


def test_sentence_follows_the_numbers(results):
    # the interval of the ratio: ± hypot(ln 10/9, ln 1.1) = 0.142 around the logarithm
    more = sentence(with_k3(results, {"bf16": (1e-3, 9e-4, 1.1e-3), "fp16": (1e-5, 9e-6, 1.1e-5)}))
    assert "disagree 100 [87, 120] times as much in BF16 as in FP16" in more
    less = sentence(with_k3(results, {"bf16": (1e-5, 9e-6, 1.1e-5), "fp16": (1e-3, 9e-4, 1.1e-3)}))
    assert "disagree 0.010 [0.0087, 0.012] times as much in BF16 as in FP16" in less
    unclear = sentence(with_k3(results, {"bf16": (2e-5, 1e-6, 1e-4), "fp16": (1e-5, 1e-6, 1e-4)}))
    assert "too small to tell" in unclear


def test_sentence_without_both_precisions(results):
    only = [cell for cell in results.cells if cell.precision == "bf16"]
    assert "nothing to compare" in sentence(dataclasses.replace(results, cells=only))
    assert "nothing to compare" in sentence(dataclasses.replace(results, cells=[]))


def test_the_command_asks_for_a_report_first(synthetic, tmp_path):
    with pytest.raises(UserError, match=r"headline\.json"):
        table(synthetic.config(tmp_path))
