"""dvc.yaml is in step with the configuration that it versions; tests/workflow compares its stages with the rules."""

from __future__ import annotations

from pathlib import Path

import yaml

from halfmatch.config import Config
from halfmatch.config_files import validate
from halfmatch.stages import to_dvc_yaml

REPOSITORY = Path(__file__).parents[1]


def test_dvc_yaml_is_generated_from_the_default_configuration() -> None:
    text = (REPOSITORY / "dvc.yaml").read_text(encoding="utf-8")
    assert text == to_dvc_yaml(Config()), "halfmatch config --as stages > dvc.yaml"


def test_every_stage_depends_on_the_checksums_of_its_code_and_one_stage_on_the_sources() -> None:
    stages = yaml.safe_load(to_dvc_yaml(Config()))["stages"]
    code = stages.pop("code")
    assert code["deps"] == ["src/halfmatch"]
    for name, stage in stages.items():
        rule = stage["cmd"].split("--allowed-rules ")[1].split()[0]
        assert [dep for dep in stage["deps"] if "/code/" in dep] == [f"${{output}}/code/{rule}.sha256"], name
        assert set(stage["deps"]) & set(code["outs"]), name


def test_cores_and_profiles_stand_in_no_command() -> None:
    """They would be part of a stage's hash: another number of cores would run everything again."""
    stages = yaml.safe_load(to_dvc_yaml(Config()))["stages"]
    assert "snakemake" not in stages.pop("code")["cmd"]
    for name, stage in stages.items():
        assert stage["cmd"].startswith("snakemake $SMK_ARGS --allowed-rules "), name


def test_a_grid_has_a_stage_of_the_pairs_that_the_others_do_not_have() -> None:
    stages = yaml.safe_load(to_dvc_yaml(validate({"mismatch": {"grid": ["bf16", "fp16"]}}, "")))["stages"]
    crossed = [{"rollout": "bf16", "train": "fp16"}, {"rollout": "fp16", "train": "bf16"}]
    for step in ("scores", "mismatch", "fidelity"):
        assert stages[f"{step}-grid"]["matrix"]["pair"] == crossed
        assert "${item.pair.rollout}/${item.pair.train}/" in stages[f"{step}-grid"]["cmd"]
        assert "${item.rollout}/${item.rollout}/" in stages[step]["cmd"]


def test_what_a_configuration_lists_is_referred_to_so_that_a_longer_list_needs_no_other_file() -> None:
    longer = {"training": {"seeds": [0, 1, 2, 3], "objectives": ["gspo"]}, "mismatch": {"precisions": ["bf16"]}}
    one, other = (yaml.safe_load(to_dvc_yaml(validate(changes, ""))) for changes in ({}, longer))
    assert one["stages"] == other["stages"]
