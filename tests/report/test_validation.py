"""Accuracy along the training: curves with their ends, means over seeds, and what cannot be served."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from halfmatch import report
from halfmatch.config import Config
from halfmatch.paths import Paths, Run
from halfmatch.report import validation
from halfmatch.report.figures import style
from halfmatch.report.figures import validation as figure
from halfmatch.report.results import ValidationCell, collect
from halfmatch.report.validation import Setting

SERVED = Setting("train", "transformers", None)


def one(results, precision, objective="grpo", setting=SERVED):
    return validation.means(results, setting, objective, validation.curves(results))[precision]


def with_config(results, **evaluation):
    values = results.config.model_dump(mode="json")
    values["evaluation"] |= evaluation
    return dataclasses.replace(results, config=Config.model_validate(values))


def of_precision(cells, precision):
    return [dataclasses.replace(cell, precision=precision) for cell in cells if cell.engine != "trainer"]


def test_a_curve_begins_at_the_initial_model_and_keeps_what_was_validated(validated):
    curves = validation.curves(validated)
    assert len(curves) == 12 * 2 * 2  # runs, benchmarks, engines
    (curve,) = [c for c in curves if c.run == Run("fp16", "grpo", 2) and c.setting == SERVED]
    assert list(curve.scores) == [0, 20, 40, 60]
    assert [curve.scores[at].value for at in (20, 40, 60)] == pytest.approx([0.22, 0.42, 0.62])
    evaluated = {(c.run, c.problems, c.engine, c.precision): c.metrics["metrics"]["avg"] for c in validated.evaluations}
    assert curve.scores[0].value == evaluated["initial", "train", "transformers", "fp16"]["value"]


def test_a_run_that_ended_between_two_sets_ends_at_its_evaluation(validated):
    run = Run("fp16", "grpo", 2)
    logs = [dataclasses.replace(log, iterations=47) if log.name == run else log for log in validated.runs]
    curves = validation.curves(dataclasses.replace(validated, runs=logs))
    (curve,) = [c for c in curves if c.run == run and c.setting == SERVED]
    assert list(curve.scores) == [0, 20, 40, 47, 60]


def test_the_mean_over_seeds_has_student_s_interval(validated):
    mean = one(validated, "bf16")
    seeds = np.array([0.1, 0.11, 0.12])  # after a third of the way to 0.3
    half = stats.t.ppf(0.975, 2) * seeds.std(ddof=1) / math.sqrt(3)
    assert len(mean.curves) == 3
    assert mean.scores[20] == pytest.approx((0.11, 0.11 - half, 0.11 + half))
    assert mean.scores[0] == mean.curves[0].scores[0]  # all seeds start there, so it has no interval over seeds


def test_a_single_seed_has_the_interval_of_its_problems(validated):
    alone = dataclasses.replace(validated, validations=[c for c in validated.validations if c.run.seed == 1])
    assert one(alone, "fp16").scores[40] == pytest.approx((0.41, 0.36, 0.45))
    drawing = drawn(alone)
    assert "interval over problems, of a single run" in drawing.caption


def test_a_mean_is_of_what_all_seeds_have(validated):
    cells = [shortened(cell) if cell.run.seed == 2 else cell for cell in validated.validations]
    mean = one(dataclasses.replace(validated, validations=cells, evaluations=[], runs=[]), "fp16")
    assert list(mean.scores) == [20]


def shortened(cell):
    """After its first set of weights the run went wrong."""
    scores = {name: {"20": one["20"]} for name, one in cell.metrics["scores"].items()}
    return dataclasses.replace(cell, metrics={"scores": scores, "not_finite": {"40": "weight w is not finite"}})


def test_weights_without_a_score_are_named(validated):
    cells = [shortened(cell) for cell in validated.validations if cell.run == Run("fp16", "grpo", 2)]
    assert validation.statement(cells).startswith(
        "Not finite as deployed, and so without a score: fp16_grpo_seed2 after 40 iterations in transformers, FP16; "
    )
    assert validation.statement(validated.validations) == ""


def test_a_run_without_any_score_has_no_curve(validated):
    empty = [
        ValidationCell(Run("bf16", "grpo", 0), "transformers", "bf16", {"scores": {"train": {}}, "not_finite": {}})
    ]
    nothing = dataclasses.replace(validated, validations=empty, evaluations=[])
    assert validation.curves(nothing) == []
    assert validation.summary(nothing).rows == ()


def test_deployed_in_several_precisions_the_figure_shows_weights_as_they_were_trained(validated):
    listed = with_config(validated, precisions=["fp32", "bf16", "fp16"])
    cells = [cell for dtype in ("fp32", "bf16", "fp16") for cell in of_precision(validated.validations, dtype)]
    listed = dataclasses.replace(listed, validations=cells)
    known = validation.curves(listed)
    assert [setting.precision for setting in validation.drawn(listed, known)] == [None, None]
    of_run = [c.setting.precision for c in known if c.run == Run("bf16", "grpo", 0) and c.setting.benchmark == "train"]
    assert sorted(map(str, of_run)) == ["None", "bf16", "fp16", "fp32"]
    only = with_config(validated, precisions=["fp32"])
    only = dataclasses.replace(only, validations=of_precision(validated.validations, "fp32"))
    assert [one.precision for one in validation.drawn(only, validation.curves(only))] == ["fp32", "fp32"]


def test_the_summary_says_where_the_mean_is_highest(validated):
    rows = {row[:4]: row for row in validation.summary(validated).rows}
    assert len(rows) == 2 * 2 * 2  # benchmarks, objectives, precisions; of the engine that is deployed
    row = rows["train", "transformers, as trained", "grpo", "FP16"]
    assert row[4] == "3"
    assert row[6].startswith("0.610 [")
    assert row[6].endswith("] after 60")
    cells = [falling(cell) for cell in validated.validations]
    fell = dataclasses.replace(validated, validations=cells, evaluations=[])
    rows = {row[:4]: row for row in validation.summary(fell).rows}
    row = rows["train", "transformers, as trained", "grpo", "FP16"]
    assert "after 40" in row[6]
    assert row[7].startswith("0.210 [")


def falling(cell):
    """In the end it is as after the first set."""
    scores = {name: {**one, "60": one["20"]} for name, one in cell.metrics["scores"].items()}
    return dataclasses.replace(cell, metrics={**cell.metrics, "scores": scores})


def test_every_number_is_in_the_table_beside_the_other_precision_s(validated):
    table = validation.table(validated)
    assert table.header[-2:] == ("BF16", "FP16")
    assert len(table.rows) == 2 * 2 * 2 * 4  # benchmarks, engines, objectives, iterations
    (row,) = [row for row in table.rows if row[:4] == ("heldout", "trainer, as trained", "pg-seq-is", "40")]
    assert [cell.split()[0] for cell in row[4:]] == ["0.210", "0.410"]


# ------------------------------------------------------------------------------------------------------------- figure
def drawn(results):
    with style.styled():
        drawing = figure.draw(results)
        style.render(drawing)
        return drawing


def test_the_figure_has_a_panel_a_benchmark_and_objective_and_a_line_a_precision(validated):
    drawing = drawn(validated)
    assert len(drawing.figure.axes) == 4
    panel = drawing.figure.axes[0]
    assert panel.get_title() == "grpo"
    assert panel.get_ylabel() == "train\n(avg@8)"
    bold = {line.get_color(): line for line in panel.lines if line.get_linewidth() > 1}
    assert set(bold) == {style.COLOURS["bf16"], style.COLOURS["fp16"]}
    assert bold[style.COLOURS["fp16"]].get_xdata().tolist() == [0, 20, 40, 60]
    assert bold[style.COLOURS["fp16"]].get_ydata()[1:] == pytest.approx([0.21, 0.41, 0.61])
    assert "3 a precision and objective" in drawing.caption
    assert "no confidence interval" in drawing.caption
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()] == ["BF16", "FP16"]


def test_what_is_missing_is_said_in_the_panel(validated):
    cells = [cell for cell in validated.validations if cell.run.objective == "grpo"]
    drawing = drawn(dataclasses.replace(validated, validations=cells))
    texts = [text.get_text() for panel in drawing.figure.axes for text in panel.texts]
    assert texts == ["no values to show"] * 2


def test_the_page_shows_it_and_names_what_is_missing(validated, tmp_path):
    values = validated.config.model_dump(mode="json")
    values["training"] |= {"objectives": ["grpo"], "seeds": [0]}
    config = Config.model_validate(values)
    paths = Paths(tmp_path)
    (tmp_path / "validation").symlink_to(Path(config.output) / "validation")
    report.build(config.model_copy(update={"output": str(tmp_path)}))
    page = paths.of("report").read_text(encoding="utf-8")
    assert 'id="figure-validation"' in page
    assert 'id="table-validation"' in page
    assert not re.search("halfmatch validate --run", page)
    (tmp_path / "validation").unlink()
    assert "halfmatch validate --run bf16_grpo_seed0 --engine transformers --rollout bf16" in [
        one.command for one in collect(config.model_copy(update={"output": str(tmp_path)})).missing
    ]
