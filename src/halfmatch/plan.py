"""What a configuration would run: jobs, responses, tokens, disk; and how it differs from the paper's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from halfmatch import jobs, memory
from halfmatch.config import Config, ProblemSource, Training
from halfmatch.config_files import load
from halfmatch.errors import UserError
from halfmatch.paths import Paths
from halfmatch.rl.objective_rows import named

# Bytes a token as written, rounded up: a token id and log μ (completions), and log π beside them (scores).
COMPLETION_BYTES = 6
SCORE_BYTES = 10
# Bytes a parameter: fp32 weights and two AdamW moments in a checkpoint, fp32 weights in a trained model.
CHECKPOINT_BYTES = 12
WEIGHT_BYTES = 4
# What a difference from the paper would say nothing about.
_NOT_SETTINGS = ("output", "report", "problems", "models", "shapes", "precisions", "grading.workers")


@dataclass(frozen=True)
class Row:
    """One step: its jobs, the responses they sample or read, and upper bounds of tokens and bytes; None for unknown."""

    step: str
    jobs: int
    responses: int | None = 0
    tokens: int | None = 0
    bytes: int | None = 0


def plan(config: Config, paper: Path) -> str:
    """The plan as text."""
    rows = list(rows_of(config))
    lines = [
        f"{len(config.mismatch.models)} models × {len(config.mismatch.precisions)} precisions measured, "
        f"{len(jobs.runs(config))} training runs, {len(jobs.jobs(config, 'evaluate'))} evaluations; in {config.output}",
        "",
        f"{'step':<12}{'jobs':>8}{'responses':>14}{'tokens, at most':>18}{'disk, at most':>16}",
        *(_line(row) for row in [*rows, _total(rows)]),
        "",
    ]
    if estimated := list(memory.lines(config)):
        lines += [*estimated, ""]
    if any(None in (row.responses, row.bytes) for row in rows):
        lines += ["? depends on what the steps problems and model have not fetched yet", ""]
    return "\n".join([*lines, *_comparison(config, paper)])


def rows_of(config: Config) -> Iterator[Row]:
    """The steps that a configuration runs."""

    def count(step: str) -> int:
        return len(jobs.jobs(config, step))

    solvability, mismatch = config.solvability, config.mismatch
    yield Row("problems", count("problems"))
    sizes = {name: parameter_count(config, name) for name in jobs.model_names(config)}
    yield Row("model", count("model"), bytes=_sum(_times(size, WEIGHT_BYTES) for size in sizes.values()))

    tried = _times(problem_count(config, solvability.problems), solvability.samples)
    tokens = _times(tried, solvability.sampling.max_tokens)
    yield Row("solvability", count("solvability"), tried, tokens, _times(tokens, COMPLETION_BYTES))

    of_one = _times(  # precision, or pair of them
        _sum(problem_count(config, name) for name in mismatch.problems),
        mismatch.samples * len(mismatch.models) * len(mismatch.engines),
    )
    pairs = count("scores") * len(mismatch.precisions) // count("rollouts")
    for step, times, size in (
        ("rollouts", len(mismatch.precisions), COMPLETION_BYTES),
        ("scores", pairs, SCORE_BYTES),
    ):
        responses_ = _times(of_one, times)
        tokens = _times(responses_, mismatch.sampling.max_tokens)
        yield Row(step, count(step), responses_, tokens, _times(tokens, size))
    for step in ("mismatch", "fidelity", "origin"):
        yield Row(step, count(step))
    if training := config.training:
        objectives = [named(name, training.objective_settings.get(name)) for name in training.objectives]
        of_each = count("train") // len(objectives)
        rounds = sum(training.sampling_rounds if objective.dynamic_sampling else 1 for objective in objectives)
        batch = training.prompts_per_iteration * training.samples_per_prompt
        responses = of_each * rounds * training.iterations * batch
        trained = sum(2 if objective.critic else 1 for objective in objectives)  # models a run, in its checkpoints
        sets = 1 + kept_sets(training)
        kept = count("train") * sets * WEIGHT_BYTES + of_each * trained * training.keep_checkpoints * CHECKPOINT_BYTES
        disk = _times(sizes[solvability.model], kept)
        yield Row("train", count("train"), responses, responses * training.sampling.max_tokens, disk)
    if evaluation := config.evaluation:
        per_set = {name: problem_count(config, name) for name in evaluation.benchmarks}
        responses_ = _sum(_times(per_set[job["problems"]], evaluation.samples) for job in jobs.jobs(config, "evaluate"))
        yield Row("evaluate", count("evaluate"), responses_, _times(responses_, evaluation.sampling.max_tokens))
        if count("validate"):
            of_set = _times(_sum(iter(per_set.values())), evaluation.samples)
            responses_ = _times(of_set, count("validate") * kept_sets(config.training))
            yield Row("validate", count("validate"), responses_, _times(responses_, evaluation.sampling.max_tokens))
    yield Row("report", count("report"))


def kept_sets(training: Training | None) -> int:
    """How many sets of weights a run leaves along its training."""
    return training.iterations // training.keep_weights_every if training and training.keep_weights_every else 0


def problem_count(config: Config, name: str) -> int | None:
    """How many problems a set has, at most; None where it has to be fetched first."""
    source = config.problems[name]
    known = _rows(Paths(Path(config.output)).of("problems", problems=name))
    if known is not None:
        return known
    found = _source_rows(source)
    return found if found is None or source.sample is None else min(found, source.sample)


def _source_rows(source: ProblemSource) -> int | None:
    if source.source == "generator":
        from halfmatch.problems import load as load_problems

        return load_problems(source).num_rows
    if source.source == "file" and source.path and source.path.endswith(".parquet"):
        return _rows(Path(source.path))
    return source.sample


def _rows(path: Path) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(path).num_rows if path.is_file() else None
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a complete Parquet file ({reason}); replace it, or make it again") from None


def parameter_count(config: Config, name: str) -> int | None:
    """Parameters of a model, of its shape or else of its name; None if neither tells."""
    if shape := memory.shape_of(config, name):
        return memory.parameters(shape)
    source = config.models[name]
    named = re.search(r"(\d+(?:\.\d+)?)([MB])\b", source.id or source.path or source.package or "", re.IGNORECASE)
    return round(float(named[1]) * {"M": 1e6, "B": 1e9}[named[2].upper()]) if named else None


# --------------------------------------------------------------------------------------------------------- comparison
def _comparison(config: Config, paper: Path) -> Iterator[str]:
    if not paper.is_file():
        yield f"({paper} is not here, so there is no comparison with the paper; name it with --paper)"
        return
    yield f"Differences from {paper} (where its values come from: see there)"
    yield from (f"  {line}" for line in differences(config, load([paper]), preset_sources(paper)))


def differences(config: Config, paper: Config, sources: Mapping[str, str]) -> Iterator[str]:
    """A line a setting that is not the paper's, with the source of the paper's value, and one a section that only one
    of the two has. Of objectives that only one of the two trains, the settings are no difference beside that."""
    ours, theirs = _leaves(config.model_dump(mode="json")), _leaves(paper.model_dump(mode="json"))
    apart = {name for one, other in ((config, paper), (paper, config)) for name in _only_in(one, other)}
    here, there = _left_out(ours, theirs), _left_out(theirs, ours)
    below = tuple(f"{section}." for section in (*here, *there))
    below += tuple(f"training.objective_settings.{name}." for name in apart)
    for key in sorted(ours.keys() | theirs.keys()):
        if key.startswith((*_NOT_SETTINGS, *below)):
            continue
        if key in here or key in there:
            yield f"{key}: left out; the paper has it" if key in here else f"{key}: not of the paper"
            continue
        if ours.get(key) == theirs.get(key):
            continue
        source = f" [{sources[key]}]" if key in sources else ""
        yield f"{key}: {_told(ours, key)}; paper {_told(theirs, key)}{source}"


def preset_sources(path: Path) -> dict[str, str]:
    """What the comment behind each value of a YAML file says, by the value's key."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, str]]:
        if not isinstance(node, yaml.MappingNode):
            return
        for key_node, value in node.value:
            key = f"{prefix}{key_node.value}"
            comment = re.search(r"^.*\s#\s*(.+)$", lines[key_node.start_mark.line])
            if comment:
                yield key, comment[1].strip()
            yield from walk(value, f"{key}.")

    return dict(walk(yaml.compose(text, yaml.SafeLoader), ""))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _only_in(config: Config, other: Config) -> set[str]:
    """Objectives that are trained in one configuration alone."""
    trained, others = (set(one.training.objectives) if one.training else set() for one in (config, other))
    return trained - others


def _left_out(leaves: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """The sections that are null in one configuration and filled in the other."""
    empty = [key for key, value in leaves.items() if value is None]
    return [key for key in empty if any(other.startswith(f"{key}.") for other in others)]


def _told(leaves: Mapping[str, Any], key: str) -> str:
    if key not in leaves:
        return "none"
    value = leaves[key]
    return f"[{', '.join(str(item) for item in value)}]" if isinstance(value, list) else str(value)


# ------------------------------------------------------------------------------------------------------------ numbers
def _times(number: int | None, factor: int) -> int | None:
    return None if number is None else number * factor


def _sum(numbers: Iterator[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def _total(rows: list[Row]) -> Row:
    sampling = [row for row in rows if row.step != "scores"]  # which reads the rollouts' tokens again
    return Row(
        "total",
        sum(row.jobs for row in rows),
        _sum(row.responses for row in sampling),
        _sum(row.tokens for row in sampling),
        _sum(row.bytes for row in rows),
    )


def _line(row: Row) -> str:
    responses, tokens = (_number(number) for number in (row.responses, row.tokens))
    return f"{row.step:<12}{row.jobs:>8}{responses:>14}{tokens:>18}{_size(row.bytes):>16}"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}" if value else ""


def _size(value: int | None) -> str:
    if value is None:
        return "?"
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1000:.0f} kB" if value else ""
