"""Tracing an artefact back: every input down to the sources, and what has changed since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfmatch import artifacts, cli
from halfmatch.trace import locate, trace

if TYPE_CHECKING:
    from conftest import TinyRun

ROOT = Path("results/tiny")
CELL = ROOT / "mismatch/sharp/all/transformers-bf16"
METRICS = CELL / "bf16/mismatch.json"
RUN = "bf16_grpo_seed0"


@pytest.fixture
def run(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run, which is the working directory."""
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def test_metrics_lead_back_to_the_generator_and_the_first_model(run: Path) -> None:
    lines = trace(METRICS).splitlines()
    paths = [line.lstrip(" │├└─") for line in lines if "results/tiny" in line]
    assert paths == [
        str(METRICS),
        str(CELL / "bf16/scores.parquet"),
        str(ROOT / "models/sharp"),
        str(ROOT / "models/small"),
        str(CELL / "rollouts.parquet"),
        f"{ROOT / 'models/sharp'} (as above)",
        str(ROOT / "problems/all.parquet"),
    ]
    text = "\n".join(lines)
    assert "the built-in generator, products of 2 to 4, all" in text
    assert "bootstrapped here as models.small.bootstrap says" in text
    assert "step rollouts --engine transformers --model sharp --problems all --rollout bf16" in text
    assert text.count("(as configured now)") == 4  # mismatch, scores, rollouts, problems
    assert "CHANGED" not in text
    assert "GONE" not in text
    assert "(now " not in text


@pytest.mark.parametrize(
    "artefact",
    [
        f"train/{RUN}/log.parquet",
        f"train/{RUN}/log.csv",
        f"train/{RUN}/model",
        f"train/{RUN}/model/model.safetensors",
        f"evaluation/{RUN}/all/transformers-bf16.json",
        f"evaluation/{RUN}/all/transformers-bf16.parquet",
        "evaluation/initial/all/transformers-bf16.json",
        f"trained_weights/{RUN}",
        f"trained_weights/{RUN}/iteration-00000001",
        f"trained_weights/{RUN}/iteration-00000001/model.safetensors",
        f"validation/{RUN}/transformers-bf16.json",
        f"validation/{RUN}/trainer-bf16.parquet",
        "problems/all.excluded.parquet",
        "solvability/shards/1-of-2.parquet",
        "report/headline.json",
        "report/index.html",
        "report/figures/headline.svg",
    ],
)
def test_every_kind_of_artefact_leads_to_its_sources(artefact: str, run: Path) -> None:
    text = trace(ROOT / artefact)
    assert "the built-in generator" in text
    assert "CHANGED" not in text
    assert "GONE" not in text


def test_the_report_names_all_that_it_was_made_from(run: Path) -> None:
    text = trace(ROOT / "report/headline.json")
    # four evaluations with their counts, scores and responses; two validations; one cell of the mismatch; a log; two
    # sets of problems
    assert "made from these 20 artefacts" in text
    for path in (METRICS, ROOT / f"train/{RUN}/log.parquet", ROOT / "solvability/perfectible.parquet"):
        assert str(path) in text


def test_a_trained_model_s_weights_are_an_input_of_its_evaluation(run: Path) -> None:
    assert f"{ROOT}/train/{RUN}/model" in trace(ROOT / f"evaluation/{RUN}/all/transformers-bf16.json")


def test_weights_along_a_training_are_inputs_of_its_validation(run: Path) -> None:
    path, metrics = ROOT / f"trained_weights/{RUN}/iteration-00000001", ROOT / f"validation/{RUN}/trainer-bf16.json"
    lines = [line.lstrip(" │├└─") for line in trace(metrics).splitlines()]
    assert str(path) in lines
    assert str(ROOT / "problems/all.parquet") in lines
    shutil.rmtree(path)
    (ROOT / "problems/all.parquet").unlink()
    text = trace(metrics)
    assert f"{ROOT}/train/{RUN}/model" in text  # the same weights, after the last iteration
    shutil.rmtree(ROOT / f"train/{RUN}/model")
    text = trace(metrics)
    assert f"{path}: digest " in text
    assert f"{ROOT / 'problems/all.parquet'}: digest " in text
    assert text.count("GONE") == 2


def test_an_input_that_changed_since_is_named_with_what_to_run(run: Path) -> None:
    rollouts = CELL / "rollouts.parquet"
    rows = artifacts.read(rollouts, "completions").to_pylist()
    artifacts.write(rollouts, "completions", rows[1:], artifacts.provenance(rollouts))
    text = trace(METRICS)
    assert f"{rollouts}: digest " in text
    assert "CHANGED since" in text
    assert "run step scores again" in text


@pytest.mark.parametrize("gone", ["models/sharp", "mismatch/sharp/all/transformers-bf16/rollouts.parquet"])
def test_an_input_that_is_gone_is_named(gone: str, run: Path) -> None:
    path = ROOT / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = trace(METRICS)
    assert f"{path}: digest " in text
    assert "GONE" in text


def test_an_input_is_found_by_its_bytes_under_another_name(run: Path) -> None:
    (ROOT / "problems/all.parquet").rename(ROOT / "problems/renamed.parquet")
    assert str(ROOT / "problems/renamed.parquet") in trace(METRICS)


def test_another_configuration_shows_at_the_steps_that_it_changes(run: Path) -> None:
    layer = run / "layer.yaml"
    layer.write_text("mismatch: {samples: 3}\n", encoding="utf-8")
    lines = trace(METRICS, [ROOT / "config.yaml", layer]).splitlines()
    assert [line.split("step ")[1].split()[0] for line in lines if "CHANGED" in line] == ["rollouts"]


def test_other_versions_are_told_beside_those_that_are_installed(run: Path) -> None:
    content = json.loads(METRICS.read_text(encoding="utf-8"))
    content["provenance"]["versions"]["pyarrow"] = "1.2.3"
    METRICS.write_text(json.dumps(content), encoding="utf-8")
    assert "pyarrow 1.2.3 (now " in trace(METRICS)


def test_the_command_prints_the_tree(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(METRICS)]) == 0
    assert capsys.readouterr().out.startswith(f"{METRICS}\n")


@pytest.mark.parametrize(
    ("artefact", "message"),
    [
        ("results/tiny/nothing.json", "there is no such file or folder"),
        ("results/tiny/config.yaml", "is no artefact of a run"),
        (f"results/tiny/checkpoints/{RUN}", "is no result of a step"),
    ],
)
def test_what_is_no_artefact_is_refused(
    artefact: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", artefact]) == 2
    assert message in capsys.readouterr().err


def test_a_table_without_provenance_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = artifacts.read(ROOT / "problems/all.parquet", "problems").to_pylist()
    artifacts.write(ROOT / "problems/all.parquet", "problems", rows, {})
    assert cli.main(["trace", str(ROOT / "problems/all.parquet")]) == 2
    assert "says nothing of where it came from" in capsys.readouterr().err


def test_places_are_told_apart_by_the_layout(run: Path) -> None:
    assert locate(ROOT / "problems/all.excluded.parquet").kind == "excluded"
    assert locate(ROOT / f"train/{RUN}/model/config.json").names == {"run": RUN}
    assert locate(ROOT.absolute() / "models/small").path == ROOT / "models/small"
