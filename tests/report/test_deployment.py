"""What the report says of the deployment gap, on responses whose gaps are known."""

from __future__ import annotations

import dataclasses

import pytest

from halfmatch import artifacts
from halfmatch.report import deployment, verdicts
from halfmatch.report.headline import headline


@pytest.fixture(scope="module")
def gaps(results):
    return deployment.by_precision(results)


def test_weights_of_one_precision_stand_together_by_benchmark(gaps):
    assert [(one.weights, one.benchmark, one.precision, one.runs) for one in gaps] == [
        *(("initial model", name, precision, 1) for name in ("train", "heldout") for precision in ("bf16", "fp16")),
        *(
            (f"trained in {precision.upper()}", name, precision, 6)
            for precision in ("bf16", "fp16")
            for name in ("train", "heldout")
        ),
    ]
    assert all(one.engine == "transformers" for one in gaps)
    assert {(one.gap.problems, one.gap.pairs) for one in gaps if one.trained_in is None} == {(16, 128)}
    assert {(one.gap.problems, one.gap.pairs) for one in gaps if one.trained_in} == {(16, 6 * 128)}


def lost_answers(results, run, benchmark):
    """Counted from the tables themselves."""
    cells = {cell.engine: cell for cell in results.evaluations if (cell.run, cell.problems) == (run, benchmark)}
    correct = {engine: sum(cell.counts["correct"].to_pylist()) for engine, cell in cells.items()}
    return correct["trainer"] - correct["transformers"]


def test_the_gap_is_what_the_counts_say(results, gaps):
    (bf16,) = (one for one in gaps if (one.trained_in, one.benchmark) == ("bf16", "train"))
    runs = [f"bf16_{objective}_seed{seed}" for objective in ("grpo", "pg-seq-is") for seed in range(3)]
    lost = sum(lost_answers(results, run, "train") for run in runs)
    assert lost > 0
    assert (bf16.gap.lost, bf16.gap.gained) == (lost, 0)
    assert bf16.gap.difference.value == pytest.approx(-lost / (6 * 128))
    assert bf16.gap.same.value == pytest.approx(1 - lost / (6 * 128))
    assert bf16.gap.difference.high < 0
    assert bf16.gap.p_sign_flip < 0.01
    (fp16,) = (one for one in gaps if (one.trained_in, one.benchmark) == ("fp16", "train"))
    assert (fp16.gap.lost, fp16.gap.gained, fp16.gap.p_sign_flip) == (0, 0, 1.0)


def test_every_run_by_itself(results):
    runs = deployment.by_run(results)
    assert len(runs) == 12 * 2
    assert runs[0].weights == "BF16, grpo, seed 0"
    assert runs[0].gap.lost == lost_answers(results, "bf16_grpo_seed0", "train")


def test_the_table_is_in_percentage_points(gaps):
    table = deployment.table("deployment", "", gaps)
    rows = {row[:2]: dict(zip(table.header, row, strict=True)) for row in table.rows if "BF16" in row[2]}
    (bf16,) = (one for one in gaps if (one.trained_in, one.benchmark) == ("bf16", "heldout"))
    row = rows["trained in BF16", "heldout"]
    assert row["deployed in"] == "transformers, BF16"
    assert row["gap, percentage points"].startswith(f"−{-100 * bf16.gap.difference.value:.1f}"[:3])
    assert row["verdicts gained and lost"] == f"0 and {bf16.gap.lost} of 768"


def test_the_statement_says_where_accuracy_is_lost_and_where_not(gaps):
    text = deployment.statement(gaps)
    sentences = text.split("points. ")
    assert len(sentences) == 4
    assert [("is lost" in one, "no gap is seen" in one) for one in sentences] == 2 * [(True, False)] + 2 * [
        (False, True)
    ]
    assert text.startswith("Trained in BF16 (6 runs) and deployed in transformers, BF16, on train: ")
    assert "No trained weights" in deployment.statement([])


def test_the_headline_has_every_gap_with_its_interval(results, gaps):
    found = headline(results, {})["deployment"]
    assert found.keys() == {"train", "heldout"}
    assert found["train"].keys() == {"initial", "bf16", "fp16"}
    (bf16,) = (one for one in gaps if (one.trained_in, one.benchmark) == ("bf16", "train"))
    cell = found["train"]["bf16"]["transformers-bf16"]
    assert cell["gap"] == bf16.gap.difference._asdict()
    assert (cell["lost"], cell["pairs"], cell["runs"]) == (bf16.gap.lost, 768, 6)


def test_bf16_s_larger_loss_is_a_claim_that_can_be_judged(results):
    verdict = verdicts.deployment_gap(results)
    assert verdict.outcome == verdicts.REPRODUCED
    assert [one.what for one in verdict.comparisons] == ["train, transformers", "heldout, transformers"]
    assert verdict.comparisons[0].estimate.low > 0
    without = [cell for cell in results.evaluations if cell.engine != "trainer"]
    nothing = verdicts.deployment_gap(dataclasses.replace(results, evaluations=without))
    assert (nothing.outcome, nothing.comparisons) == (verdicts.NOT_TESTABLE, ())


def test_weights_deployed_in_another_precision_are_beside_their_own_trainer(results, tmp_path):
    """FP16 responses of the BF16 run, all wrong: all of the BF16 trainer's correct answers are lost."""
    cells = {
        cell.engine: cell for cell in results.evaluations if (cell.run, cell.problems) == ("bf16_grpo_seed0", "train")
    }
    rows = artifacts.read(cells["transformers"].responses, "completions").to_pylist()
    artifacts.write(tmp_path / "fp16.parquet", "completions", [{**row, "verdict": "wrong"} for row in rows], {})
    crossed = dataclasses.replace(cells["transformers"], precision="fp16", responses=tmp_path / "fp16.parquet")
    (one,) = deployment.by_precision(dataclasses.replace(results, evaluations=[crossed, cells["trainer"]]))
    assert (one.trained_in, one.precision) == ("bf16", "fp16")
    assert one.gap.lost == sum(cells["trainer"].counts["correct"].to_pylist())
