"""The Snakefile: what a user sees of it, and that its rules and the DVC stages are the same thing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from halfmatch.config_files import load
from halfmatch.stages import to_dvc_yaml
from halfmatch.steps import STEPS

if TYPE_CHECKING:
    from conftest import Checkout

pytestmark = pytest.mark.workflow


@pytest.fixture
def checkout(new_checkout: Callable[[str], Checkout]) -> Checkout:
    return new_checkout("checkout")


def planned_jobs(checkout: Checkout) -> dict[frozenset[str], tuple[str, set[str]]]:
    """Every job by its outputs: the rule and the inputs, as a dry run of Snakemake prints them."""
    text = checkout.run("snakemake", "-n", "--forceall", "--", "all").stdout
    jobs: dict[frozenset[str], tuple[str, set[str]]] = {}
    for block in re.split(r"^rule ", text, flags=re.MULTILINE)[1:]:
        rule, _, rest = block.partition(":")
        fields = dict(re.findall(r"^    (\w+): (.*)$", rest, flags=re.MULTILINE))
        if "output" in fields:
            jobs[frozenset(fields["output"].split(", "))] = (rule, set(fields["input"].split(", ")))
    return jobs


def stages(checkout: Checkout) -> dict[str, Any]:
    """Every stage cell that runs jobs, as DVC resolves it: rule, inputs, outputs, parameters."""
    program = """
import json
import re
from dvc.repo import Repo
found = {}
for stage in Repo().index.stages:
    parameters = [key for dep in stage.deps for key in getattr(dep, "params", [])]
    found[stage.name] = {
        "command": stage.cmd,
        "deps": [dep.def_path for dep in stage.deps if not getattr(dep, "params", None)],
        "outs": [out.def_path for out in stage.outs],
        "params": parameters,
    }
print(json.dumps(found))
"""
    found = json.loads(checkout.run("python", "-c", program).stdout)
    del found["code"]
    return found


def test_every_stage_has_the_inputs_outputs_and_parameters_of_the_jobs_it_runs(checkout: Checkout) -> None:
    jobs = planned_jobs(checkout)
    covered = set()
    for name, stage in stages(checkout).items():
        rule = stage["command"].split("--allowed-rules ")[1].split()[0]
        assert name.startswith(rule)
        mine = {outputs for outputs in jobs if outputs <= set(stage["outs"])}
        covered |= mine
        assert {jobs[outputs][0] for outputs in mine} == {rule}, name
        assert set().union(*mine) == set(stage["outs"]), name
        inputs = set().union(*(jobs[outputs][1] for outputs in mine))
        folders = {dep for dep in stage["deps"] if rule == "report" and not Path(dep).suffix}
        below = {path for path in inputs if any(path.startswith(f"{folder}/") for folder in folders)}
        assert inputs - below == set(stage["deps"]) - folders, name
        targets = stage["command"].split(" -- ")[1].split()
        assert set(targets) <= set(stage["outs"]), name
        assert len(targets) == len(mine), name
    assert covered == set(jobs)


def test_the_parameters_of_a_stage_are_those_of_its_rule(checkout: Checkout) -> None:
    for name, stage in stages(checkout).items():
        rule = stage["command"].split("--allowed-rules ")[1].split()[0]
        assert len(stage["params"]) == len(STEPS[rule].parameters), name
    found = stages(checkout)
    assert "precisions.bf16" in found["train@bf16-grpo-0"]["params"]
    assert "precisions.fp16" not in found["train@bf16-grpo-0"]["params"]
    assert "training.seeds" not in found["train@bf16-grpo-0"]["params"]


@pytest.mark.parametrize(
    "changes",
    [
        {"training": None},
        {"training": None, "evaluation": None},
        {"training": {"keep_weights_every": None}},
        {"evaluation": {"precisions": ["fp16"]}},
        {"evaluation": {"precisions": ["fp16"], "engines": ["transformers"]}},
        {"mismatch": {"gradient_fidelity": {"enabled": False}}},
        {"mismatch": {"grid": ["bf16", "fp16"], "origin": {"enabled": True}}},
    ],
)
def test_stages_are_made_for_any_shape_of_configuration(
    checkout: Checkout, changes: dict[str, Any], tmp_path: Path
) -> None:
    layer = tmp_path / "layer.yaml"
    layer.write_text(yaml.safe_dump(changes), encoding="utf-8")
    config = load([Path(__file__).with_name("tiny.yaml"), layer])
    written = checkout.run("halfmatch", "config", "--config", "config/config.yaml", str(layer)).stdout
    (checkout.root / "config/config.yaml").write_text(written, encoding="utf-8")
    (checkout.root / "dvc.yaml").write_text(to_dvc_yaml(config), encoding="utf-8")
    test_every_stage_has_the_inputs_outputs_and_parameters_of_the_jobs_it_runs(checkout)


def test_lint_finds_nothing(checkout: Checkout) -> None:
    checkout.run("snakemake", "--lint")


def refused(checkout: Checkout, *options: str) -> str:
    done = checkout.run("snakemake", "-n", *options, check=False)
    assert done.returncode == 1
    return done.stdout + done.stderr


def test_errors_of_the_configuration_are_told_as_they_are(checkout: Checkout) -> None:
    (checkout.root / "mine.yaml").write_text("training: {learning_rat: 1}\nsolvability: {model: gain12}\n")
    text = refused(checkout, "--configfile", "mine.yaml")
    assert "Traceback" not in text
    assert "mine.yaml: the configuration is not valid" in text
    assert "training.learning_rat: unknown key; did you mean learning_rate?" in text


def test_values_on_the_command_line_are_refused_with_what_to_do(checkout: Checkout) -> None:
    assert "add it with --configfile" in refused(checkout, "--config", "seed=3")


def test_only_the_configuration_that_dvc_versions_can_be_recorded(checkout: Checkout) -> None:
    text = refused(checkout, "--configfile", "config/paper.yaml", "--", "record")
    assert "dvc.yaml versions the results of config/config.yaml" in text


def test_the_default_configuration_is_no_layer_below_another(checkout: Checkout) -> None:
    """Snakemake would merge a `configfile:` of the Snakefile below --configfile."""
    (checkout.root / "mine.yaml").write_text("output: results/mine\n")
    checkout.run("snakemake", "-n", "--quiet", "all", "--configfile", "mine.yaml", "--", "problems_all")
    assert load([checkout.root / "results/mine/config.yaml"]) == load([checkout.root / "mine.yaml"])
