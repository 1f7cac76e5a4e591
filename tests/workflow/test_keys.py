"""Each key of the configuration, changed to another valid value, reruns what steps/__init__.py says and no more."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from pydantic import BaseModel

from halfmatch import jobs
from halfmatch.config import Config
from halfmatch.config_files import load, validate
from halfmatch.config_models import ModelShape
from halfmatch.errors import UserError
from halfmatch.paths import Run
from halfmatch.pipeline import Pipeline
from halfmatch.rl.objective_rows import OBJECTIVES
from halfmatch.steps import STEPS

if TYPE_CHECKING:
    from conftest import Checkout

pytestmark = pytest.mark.workflow

# The tiny run with every optional section and step, so that every key is there and used.
LAYER = """
prompt: {template: chat}
models: {large: {source: hub, id: org/large, revision: 0123456789abcdef0123456789abcdef01234567}}
shapes:
  large: {layers: 2, hidden_size: 8,
    heads: 2, kv_heads: 2, head_dim: 4, intermediate_size: 8, experts: 2, vocabulary: 9}
mismatch:
  models: [gain48]
  grid: [bf16, fp16]
  origin: {enabled: true}
training:
  objectives: [grpo, ppo]
  objective_settings: {grpo: {dynamic_sampling: true}}
  lora: {rank: 8}
evaluation: {precisions: [fp16], engines: [transformers, vllm, trainer]}
"""
# Of sections that stand side by side under names, the one whose keys are changed.
REPRESENTATIVES = {
    "problems": "heldout",
    "models": "gain48",
    "precisions": "fp16",
    "objective_settings": "grpo",
    "shapes": "large",
}
# What cannot be changed without another key, together with that.
TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "problems.heldout.source": {"source": "hub", "id": "org/name", "revision": 40 * "0"},
    "models.gain48.source": {"source": "hub", "id": "org/name", "revision": 40 * "0"},
    "precisions.fp16.loss_scaling.min_scale": {"min_scale": 2.0},
    "training.nodes": {"nodes": 2, "ranks": 2},
    "training.shard_gradients": {"shard_gradients": True, "ranks": 2},
}
# Only one value is valid here: a precision is called by its dtype, shapes fit those that weights start from, and a
# nucleus would bias ratios.
FIXED = {
    "precisions.fp16.compute",
    "precisions.fp16.rollout",
    "precisions.fp16.master",
    "mismatch.sampling.top_p",
    "training.sampling.top_p",
    *(f"models.gain48.bootstrap.{key}" for key in ("layers", "hidden_size", "heads", "kv_heads", "intermediate_size")),
}
# What changes no result: how many processes grade, where vLLM runs and how much memory it takes, and what is told of
# models that are not here, for a plan.
NO_RESULT = {
    "grading.workers",
    "engine.data_parallel",
    "engine.gpu_memory",
    "engine.server",
    *(f"shapes.large.{key}" for key in ModelShape.model_fields),
}
# Keys that say what a step reads, with the beginning of the names of the jobs that then read something else.
READS: Mapping[str, tuple[str, ...]] = {
    "solvability.model": ("solvability/", "train/", "evaluate/initial_", "validate/"),
    "solvability.problems": ("solvability/", "perfectible/"),
    "solvability.shards": ("perfectible/",),
    "solvability.precision": ("solvability/",),
}
# What everything depends on: where it lies, and the one seed.
EVERY_RESULT = {"output", "seed"}


# ------------------------------------------------------------------------------------------------ other valid values
def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of a configuration as plain values, of side-by-side sections those of one."""
    if isinstance(value, dict) and value:
        only = REPRESENTATIVES.get(path[-1]) if path else None
        for key, item in value.items():
            if only is None or key == only:
                yield from leaves(item, (*path, key))
    else:
        yield path


def at(values: Any, path: Iterable[str]) -> Any:
    for part in path:
        values = values[part]
    return values


def with_value(values: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(dict(values))
    at(changed, path[:-1])[path[-1]] = value
    return changed


def annotation_of(path: tuple[str, ...]) -> Any:
    """The type that the configuration declares for a key."""
    found: Any = Config
    for part in path:
        section = next((kind for kind in alternatives(found) if is_section(kind)), None)
        found = section.model_fields[part].annotation if section else typing.get_args(mapping(found))[1]
    return found


def alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def mapping(annotation: Any) -> Any:
    return next(kind for kind in alternatives(annotation) if typing.get_origin(kind) is dict)


def literals(annotation: Any) -> Iterator[Any]:
    """The values that a type lists, at any depth."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        for inner in typing.get_args(annotation):
            yield from literals(inner)


def candidates(value: Any, path: tuple[str, ...], config: Config) -> Iterator[Any]:
    """Values to try in place of one, the likeliest first."""
    listed = list(literals(annotation_of(path)))
    names = [*config.models, *config.problems, *config.precisions, *OBJECTIVES]
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, value / 2, (value + 1) / 2, value - 1)
    elif isinstance(value, list):
        for item in [*listed, *names, *(item + 1 for item in value if isinstance(item, int)), 0, 1]:
            yield [*value, item]
        yield from (value[:-1], [item / 2 for item in value if isinstance(item, float)])
        yield from ([item + 1 for item in value if isinstance(item, int)], [item + 1 for item in value[:1]])
    else:
        yield from (*listed, *names, 1, "another", "http://localhost:8000", None)


def another(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """The configuration with another valid value at a key; None where there is no such value."""
    if together := TOGETHER.get(".".join(path)):
        return with_value(values, path[:-1], {**at(values, path[:-1]), **together})
    config = validate(values, "")
    for value in candidates(at(values, path), path, config):
        try:
            changed = validate(with_value(values, path, value), "").model_dump(mode="json")
        except UserError:
            continue
        if changed != values:
            return changed
    return None


# --------------------------------------------------------------------------------------------------------- what runs
@dataclass(frozen=True)
class Job:
    """A job of a plan; it goes by its log. `inputs` are those that it was last made with."""

    outputs: frozenset[str]
    inputs: frozenset[str]
    runs: bool


def read_summary(text: str) -> dict[str, Job]:
    """The jobs of Snakemake's table of files."""
    found: dict[str, Job] = {}
    for line in text.splitlines()[1:]:
        output, _, _, log, inputs, *_, plan = line.split("\t")
        before = found.get(log)
        outputs = {output} | (before.outputs if before else set())
        found[log] = Job(frozenset(outputs), frozenset(inputs.split(",")), plan == "update pending")
    return found


def implied(config: Config, names: Mapping[str, str]) -> dict[str, str]:
    """What a job's wildcards stand for, to fill the keys of its step with."""
    run = names.get("run", jobs.INITIAL)
    matrix = (
        {} if run == jobs.INITIAL else {"precision": Run.parse(run).precision, "objective": Run.parse(run).objective}
    )
    return {**names, **matrix, "solvability_precision": config.solvability.precision}


def touched(config: Config, changed: Iterable[str]) -> set[str]:
    """The main results of the jobs whose parameters, by the table of steps, a changed key is among."""
    pipeline, found = Pipeline(config, ()), set()
    for step, described in STEPS.items():
        for names, result in zip(jobs.jobs(config, step), pipeline.results(step), strict=True):
            keys = [
                key.format(**{"objective": "", "precision": "", **implied(config, names)})
                for key in described.parameters
            ]
            if any(covers(key, leaf) or covers(leaf, key) for key in keys for leaf in changed):
                found.add(result)
    return found


def covers(key: str, leaf: str) -> bool:
    return leaf == key or leaf.startswith(f"{key}.")


def differing(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> set[str]:
    """The keys in which two configurations differ."""
    found: set[str] = set()
    for key in one.keys() | other.keys():
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differing(a, b, f"{path}{key}.")
        elif a != b:
            found.add(f"{path}{key}")
    return found


@dataclass(frozen=True)
class Change:
    """A configuration with one key changed, and what both tools make of it."""

    values: dict[str, Any]
    jobs: dict[str, Job]
    stages: dict[str, list[str]]
    changed_stages: set[str]


class Plan(NamedTuple):
    """Names of jobs."""

    direct: set[str]
    whole: set[str]


def expected(before: dict[str, Job], after: dict[str, Job], change: Change, leaf_keys: set[str]) -> Plan:
    """The jobs that a change is of (a parameter, an input, the job itself), and those with all that follow."""
    results = touched(validate(change.values, ""), leaf_keys)
    begins = tuple(f"{change.values['output']}/logs/{begin}" for key in leaf_keys for begin in READS.get(key, ()))
    direct = {
        name for name, job in after.items() if job.outputs & results or name not in before or name.startswith(begins)
    }
    whole = set(direct)
    while True:
        made = {output for name in whole for output in after[name].outputs}
        more = {name for name, job in after.items() if job.inputs & made} - whole
        if not more:
            return Plan(direct, whole)
        whole |= more


@pytest.fixture(scope="module")
def checkout(new_checkout: Callable[[str], Checkout], stand_ins: Callable[[Checkout], None]) -> Checkout:
    """The tiny run with all that there can be, every result of which is there as a stand-in."""
    made = new_checkout("keys")
    layer = made.root / "layer.yaml"
    layer.write_text(LAYER, encoding="utf-8")
    written = made.run("halfmatch", "config", "--config", "config/config.yaml", str(layer)).stdout
    (made.root / "config/config.yaml").write_text(written, encoding="utf-8")
    stages = made.run("halfmatch", "config", "--config", "config/config.yaml", "--as", "stages").stdout
    (made.root / "dvc.yaml").write_text(stages, encoding="utf-8")
    stand_ins(made)
    return made


@pytest.fixture(scope="module")
def changes(checkout: Checkout) -> dict[str, Change]:
    """By key; "" is the configuration as it is."""
    values = load([checkout.root / "config/config.yaml"]).model_dump(mode="json")
    asked = {"": values}
    for path in leaves(values):
        changed = another(values, path)
        if changed is not None:
            asked[".".join(path)] = changed
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("plans.py"))],
        input=json.dumps(list(asked.values())),
        cwd=checkout.root,
        env=checkout.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        key: Change(asked[key], read_summary(of["snakemake"]), of["dvc"]["files"], set(of["dvc"]["changed"]))
        for key, of in zip(asked, json.loads(done.stdout), strict=True)
    }


def test_every_key_is_changed_but_those_with_one_valid_value(checkout: Checkout, changes: dict[str, Change]) -> None:
    values = changes[""].values
    keys = {".".join(path) for path in leaves(values)}
    assert keys - changes.keys() == FIXED
    declared = {re.sub(r"\bNAME\b", "*", key) for key in declared_keys(Config)}
    names = "|".join(REPRESENTATIVES.values())
    assert declared == {re.sub(rf"(?<=\.)({names})(?=\.)", "*", key) for key in keys}


def declared_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the configuration's model, also of sections that can be left out."""
    for key, field in section.model_fields.items():
        kinds = alternatives(field.annotation)
        nested = next((kind for kind in kinds if is_section(kind)), None)
        named = next((typing.get_args(kind)[1] for kind in kinds if typing.get_origin(kind) is dict), None)
        if nested:
            yield from declared_keys(nested, f"{prefix}{key}.")
        elif is_section(named):
            yield from declared_keys(named, f"{prefix}{key}.NAME.")
        elif named is not None:
            yield f"{prefix}{key}.NAME.dynamic_sampling"
        else:
            yield f"{prefix}{key}"


def test_a_changed_key_reruns_the_jobs_that_depend_on_it_and_no_other(changes: dict[str, Change]) -> None:
    before, wrong = changes[""], {}
    assert not any(job.runs for job in before.jobs.values())
    for key, change in changes.items():
        whole = expected(before.jobs, change.jobs, change, differing(before.values, change.values)).whole
        running = {name for name, job in change.jobs.items() if job.runs}
        if running != whole:
            wrong[key] = {"runs besides": sorted(running - whole), "does not run": sorted(whole - running)}
    assert wrong == {}


def test_a_changed_key_changes_the_stages_of_the_jobs_it_is_of_and_no_other(changes: dict[str, Change]) -> None:
    before, wrong = changes[""], {}
    assert before.changed_stages == set()
    for key, change in changes.items():
        leaf_keys = differing(before.values, change.values)
        if any(leaf.startswith("training.objective_settings.") for leaf in leaf_keys):
            # DVC wants keys that are there, so a stage has all settings; Snakemake runs the jobs of the changed one.
            leaf_keys = {"training.objective_settings"}
        direct = expected(before.jobs, change.jobs, change, leaf_keys).direct
        outputs = {output for name in direct for output in change.jobs[name].outputs}
        of_direct = {stage for stage, files in change.stages.items() if outputs & set(files)}
        changed = change.changed_stages - ({"code"} if key == "output" else set())  # whose checksums lie there too
        if of_direct != changed:
            wrong[key] = {"changed besides": sorted(changed - of_direct), "not changed": sorted(of_direct - changed)}
    assert wrong == {}


def test_no_key_reruns_nothing_or_everything_but_those_named(changes: dict[str, Change]) -> None:
    running = {key: [job.runs for job in change.jobs.values()] for key, change in changes.items() if key}
    assert {key for key, runs in running.items() if not any(runs)} == NO_RESULT
    assert {key for key, runs in running.items() if all(runs)} == EVERY_RESULT
