import csv
import math

import pytest

from halfmatch import artifacts
from halfmatch.rl.training_log import COLUMNS, LiveTable, complete, write_curves


def numbers(step):
    whole = complete({"iteration": step // 2, "step": step, "loss": 0.1 + step, "gradient_norm": math.nan})
    required = ("reward", "response_tokens", "truncated_responses", "timeout_responses", "learning_rate", "skip_share")
    return {**whole, **dict.fromkeys(required, 0.25), "step_skipped": step == 1}


def test_a_row_has_every_column_and_no_other():
    row = complete({"step": 3})
    assert tuple(row) == COLUMNS
    assert row["step"] == 3
    assert row["k3"] is None
    with pytest.raises(ValueError, match="k4"):
        complete({"k4": 1.0})


def test_rows_are_on_disk_as_they_come(tmp_path):
    table = LiveTable(tmp_path / "run", "log.csv", COLUMNS, [numbers(0)])
    for step in (1, 2):
        table.append(numbers(step))
        with open(tmp_path / "run" / "log.csv", encoding="utf-8") as file:
            assert [row["step"] for row in csv.DictReader(file)] == [str(seen) for seen in range(step + 1)]
    table.close()


def test_curves_hold_what_the_table_holds(tmp_path):
    rows = [numbers(step) for step in range(3)]
    write_curves(tmp_path / "log.csv", rows)
    artifacts.write(tmp_path / "log.parquet", "training_log", rows, {})
    table = artifacts.read(tmp_path / "log.parquet", "training_log").to_pylist()
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        for read, stored in zip(csv.DictReader(file), table, strict=True):
            assert read["k3"] == ""
            assert stored["k3"] is None
            assert float(read["loss"]) == stored["loss"]
            assert read["gradient_norm"] == "nan"
            assert math.isnan(stored["gradient_norm"])
            assert read["step_skipped"] == str(stored["step_skipped"])
