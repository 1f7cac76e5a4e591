"""Tables hold the numbers of the artefacts."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from halfmatch.config_files import to_yaml
from halfmatch.paths import Paths
from halfmatch.report import comparison, origin, tables
from halfmatch.report.numbers import number, with_interval
from halfmatch.report.results import estimate
from halfmatch.report.tables import Table
from halfmatch.statistics import Estimate, t_interval


def rows_of(table: Table):
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_headline(finished, results):
    rows = rows_of(tables.headline(results))
    assert [(row["model"], row["precision"]) for row in rows] == [
        *(("gain16", "BF16"), ("gain16", "FP16"), ("gain120", "BF16"), ("gain120", "FP16"))
    ]
    path = Paths(Path(finished.output)).of(
        "mismatch", model="gain120", problems="all", engine="transformers", rollout="bf16", train="bf16"
    )
    metrics = json.loads(path.read_text())["metrics"]
    shown = rows[2]
    for header, name in {
        "k3 (nats a token)": "k3",
        "σ of Σd, seen": "sigma",
        "σ by the law": "sigma_predicted",
        "ESS/N": "ess_share",
        "usable length T½ (tokens)": "usable_length",
    }.items():
        assert shown[header] == with_interval(estimate(metrics[name]))
    assert shown["gradient cosine, pg-seq-is"] == "0.600 [0.570, 0.620]"


def test_mismatch_has_every_metric_of_every_cell(results):
    table = tables.mismatch(results)
    assert len(table.rows) == 4
    assert not any("–" in row for row in table.rows)


def test_the_grid_has_every_pair_in_the_order_of_the_configuration(crossed):
    assert [(cell.rollout, cell.train) for cell in crossed.crossed] == [("bf16", "fp16"), ("fp16", "bf16")]
    assert [cell.precision for cell in crossed.cells] == ["bf16", "fp16"]
    rows = rows_of(tables.grid(crossed))
    assert [(row["engine"], row["trainer"]) for row in rows] == [
        *(("BF16", "BF16"), ("BF16", "FP16"), ("FP16", "BF16"), ("FP16", "FP16"))
    ]
    assert rows[1]["k3 (nats a token)"] == with_interval(crossed.crossed[0].metric("k3"))


def test_parts_say_what_of_the_kl_goes_away_with_each(traced):
    rows = rows_of(tables.parts(traced))
    assert [row["in fp32"] for row in rows] == 4 * ["nothing more", "attention", "mlp"]
    assert [row["goes away"] for row in rows[:3]] == ["–", "0.900 [0.810, 0.990]", "0.100 [0.0900, 0.110]"]
    assert rows[1]["KL"] == with_interval(estimate(traced.origins[0].content["parts"][0]["kl"]))


def test_gradients_have_a_row_for_every_objective_of_every_cell(results):
    rows = rows_of(tables.gradients(results))
    assert len(rows) == 4 * 3
    assert rows[0]["cosine"] == "0.850 [0.820, 0.870]"
    assert rows[0]["variance"] == "–"  # not in these artefacts


def test_training_has_a_row_a_run(results):
    rows = rows_of(tables.training(results))
    assert len(rows) == 12
    run = results.runs[0]
    last = run.series["reward"][-10:]
    assert rows[0]["final reward"] == with_interval(Estimate(last.mean(), *t_interval(last)))
    assert rows[0]["iterations"] == "60"
    assert rows[0]["what the monitors said"] == "–"


def test_rewards_over_seeds_have_intervals_and_collapses_are_counted(results):
    (row,) = (
        row
        for row in rows_of(tables.training_by_precision(results))
        if (row["precision"], row["objective"]) == ("FP16", "grpo")
    )
    runs = results.training_runs("fp16", "grpo")
    low, high = t_interval([run.final_reward for run in runs])
    value = sum(run.final_reward for run in runs) / 3
    assert row["final reward"] == with_interval(Estimate(value, low, high))
    assert row["collapsed"] == "0 of 3 [0 %, 56 %]"  # Wilson's: z² / (3 + z²)


def test_training_says_where_a_run_ended_early_and_why(results):
    ended = dataclasses.replace(results.runs[0], iterations=20, events=[(60, "collapse of the reward: it fell")])
    (row,) = rows_of(tables.training(dataclasses.replace(results, runs=[ended])))
    assert row["iterations"] == "20 of 60"
    assert row["what the monitors said"] == "step 60: collapse of the reward: it fell"


def test_evaluation_has_a_row_for_weights_benchmark_engine_and_precision(finished, results):
    rows = rows_of(tables.evaluation(results))
    assert len(rows) == (2 * 2 + 12 * 2) * 2  # by the engine and by the trainer
    assert [name for name in rows[0] if "@" in name] == [*("avg@8", "pass@1", "pass@4", "maj@1", "maj@4")]
    names = {"run": "fp16_grpo_seed1", "problems": "heldout", "engine": "transformers", "rollout": "fp16"}
    metrics = json.loads(Paths(Path(finished.output)).of("evaluation_metrics", **names).read_text())["metrics"]
    place = ("FP16, grpo, seed 1", "heldout", "transformers")
    (row,) = (row for row in rows if (row["weights"], row["benchmark"], row["engine"]) == place)
    assert row["pass@4"] == with_interval(estimate(metrics["pass@4"]))


def test_perfectible_counts_add_up(results):
    rows = {row[0]: row[1] for row in tables.perfectible(results).rows}
    kept, less, more = (
        int(rows[name]) for name in ("problems kept", "left out, solved less often", "left out, solved more often")
    )
    assert kept + less + more == int(rows["problems tried"]) == 48
    tries = [int(rows[f"tries {verdict}"].split()[0].replace(",", "")) for verdict in tables.VERDICTS]
    assert sum(tries) == 48 * 40
    for verdict, count in zip(tables.VERDICTS, tries, strict=True):
        share, low, high = map(float, re.search(r"\((\S+) \[(\S+), (\S+)\] %\)", rows[f"tries {verdict}"]).groups())
        assert share == pytest.approx(100 * count / sum(tries), rel=0.005)
        assert (low < share < high) if count else low == share == high == 0


def test_excluded_rows_are_named(results):
    assert tables.excluded(results).rows == (("train", "3", "duplicate of row 1", "2×3"),)


def test_a_row_is_as_long_as_the_header():
    with pytest.raises(ValueError, match="as long as the header"):
        Table("name", "caption", ("a", "b"), (("1",),))


# ---------------------------------------------------------------------------------------------------- beside the paper
def test_offline_values_stand_beside_the_papers(results):
    rows = rows_of(comparison.offline(results))
    assert [row["paper"] for row in rows] == ["7.64 [F]", "0.32 [F]", "−1.01 [F]", "−0.07 [F]"]
    cell = results.cell(results.setups[1], "bf16")
    assert rows[0]["this run, gain120"] == with_interval(cell.metric("kl_sequence"))


def test_online_values_are_of_the_phase_that_the_paper_shows(results):
    rows = rows_of(comparison.online(results))
    (start,) = (row for row in rows if (row["precision"], row["paper"]) == ("BF16", "0.001 [F]"))
    runs = results.training_runs("bf16", "grpo")
    assert start["this run, grpo"].startswith(number(sum(run.series["k3"][:10].mean() for run in runs) / len(runs)))
    assert "[" in start["this run, grpo"]
    (extreme,) = (row for row in rows if (row["precision"], row["paper"]) == ("FP16", "0.1 [F]"))
    assert extreme["this run, grpo"].endswith(", largest of 30"), "10 iterations of 3 seeds"
    assert [row["this run, grpo"] for row in rows if row["when"] == "at collapse"] == ["no run collapsed"] * 2


def test_training_accuracies_stand_beside_the_papers(results):
    rows = rows_of(comparison.training(results))
    (row,) = (row for row in rows if (row["objective"], row["precision"]) == ("grpo", "BF16"))
    assert row["paper"] == "0.84 at step 400 [F]"
    best = [run.best_reward for run in results.training_runs("bf16", "grpo")]
    assert row["this run"].startswith(number(sum(best) / 3))
    assert row["seeds"] == "3"


def test_untrained_scores_are_percentages_like_the_papers(results):
    rows = rows_of(comparison.untrained(results))
    assert rows[0] == {
        "from": "paper",
        "benchmark": "AMC23, 8,192 tokens",
        "BF16": "50.38 [T]",
        "FP16": "50.60 [T]",
        "FP32": "51.54 [T]",
    }
    ours = [row for row in rows if row["from"] == "this run"]
    assert [row["benchmark"] for row in ours] == [
        f"{problems}, {engine}" for problems in ("train", "heldout") for engine in ("transformers", "trainer")
    ]
    assert 20 < float(ours[0]["BF16"].split()[0]) < 80
    assert ours[0]["FP32"] == "–"


def test_findings_say_what_these_runs_look_like(results):
    own = {row["finding"]: row["this run"] for row in rows_of(comparison.findings(results))}
    assert "with k3 of 0.001 or more at the start: 0 of 6 runs collapsed; others: 0 of 6 runs collapsed" in own.values()
    assert "BF16: 0 of 6 runs collapsed; FP16: 0 of 6 runs collapsed" in own.values()


# -------------------------------------------------------------------------------------------------------------- origin
def test_every_file_stands_there_with_its_digest(results):
    rows = rows_of(origin.artefacts(results))
    assert len(rows) == len(results.artefacts)
    assert {len(row["SHA-256"]) for row in rows} == {64}
    assert "train/bf16_grpo_seed0/log.parquet" in {row["file"] for row in rows}


def test_what_really_computed_is_said_by_precision(results):
    rows = rows_of(origin.computed_in(results))
    assert {(row["step"], row["precision"], row["files"]) for row in rows} == {
        ("rollouts", "bf16", "2"),
        ("rollouts", "fp16", "2"),
    }
    assert "engine.emulated true" in rows[0]["recorded"]


def test_two_versions_of_a_package_are_both_named(results):
    first, second = (
        dataclasses.replace(results.artefacts[0], provenance={"versions": {"torch": version}}) for version in ("1", "2")
    )
    (row,) = origin.versions(dataclasses.replace(results, artefacts=[first, second])).rows
    assert row == ("torch", "1 and 2")


def test_settings_are_those_that_a_result_depends_on(results):
    settings = dict(origin.settings(results).rows)
    assert settings["training.learning_rate"] == "1.5e-05"
    assert settings["precisions.bf16"].startswith('{"compute": "bf16"')
    assert not {"output", "engine.gpu_memory", "grading.workers"} & settings.keys()


def test_without_the_preset_there_is_no_comparison(results, tmp_path):
    assert origin.differences(results, tmp_path / "paper.yaml") is None


def test_differences_from_a_preset_are_named_with_their_source(results, tmp_path):
    preset = tmp_path / "paper.yaml"
    text = to_yaml(results.config).replace("learning_rate: 1.5e-05", "learning_rate: 1e-6  # T, C")
    preset.write_text(text.replace("gpu_memory: 0.6", "gpu_memory: 0.9"))  # nothing that a result depends on
    assert origin.differences(results, preset) == ["training.learning_rate: 1.5e-05; paper 1e-06 [T, C]"]
