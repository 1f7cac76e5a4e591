"""Where an artefact came from: the step that made it, the inputs it read as they lie on disk now, down to the sources.

An artefact names its inputs by digests. Here every digest is looked for among the artefacts beside it, so the tree says
what has changed since, or is gone, and whether the present configuration would make the same again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from halfmatch import __version__, artifacts, jobs
from halfmatch.config import Config, ModelSource, ProblemSource
from halfmatch.config_files import load
from halfmatch.errors import UserError
from halfmatch.paths import LAYOUT, Paths
from halfmatch.steps import STEPS, artefact_digest, digest, parameters

# Artefacts without provenance of their own, and which of the same job has it.
_SPOKEN_FOR = {
    "mismatch_curves": "mismatch",
    "training_curves": "training_log",
    "trained": "training_log",
    "trained_weights": "training_log",
    "weights_of_iteration": "training_log",
    "report": "headline",
    "figures": "headline",
}
SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Node:
    """One artefact of the tree: what it is, what can be said of it, and what it was made from."""

    title: str
    facts: tuple[str, ...] = ()
    inputs: tuple[Node, ...] = ()

    def lines(self) -> Iterator[str]:
        """The tree as text."""
        yield self.title
        for fact in self.facts:
            yield f"{'│' if self.inputs else ' '}    {fact}"
        for node in self.inputs:
            is_last = node is self.inputs[-1]
            first, *others = node.lines()
            yield f"{'└' if is_last else '├'}── {first}"
            yield from (f"{' ' if is_last else '│'}   {line}" for line in others)


def trace(artefact: Path, configuration: Iterable[Path] = ()) -> str:
    """The tree of an artefact, as text.

    configuration: the files to compare with; without any, the one that the workflow keeps beside the artefacts, or
    else the laptop run.
    """
    found = locate(artefact)
    files = list(configuration) or [file for file in [found.root / "config.yaml"] if file.is_file()]
    return "\n".join(Tracer(found.root, load(files)).node(found).lines())


@dataclass(frozen=True)
class Located:
    """An artefact by its place in the layout of results."""

    root: Path
    kind: str
    names: Mapping[str, str]

    @property
    def path(self) -> Path:
        return Paths(self.root).of(self.kind, **self.names)


def locate(artefact: Path) -> Located:
    """Which artefact a path is; a file of a model folder, or a figure, stands for the whole. UserError for others."""
    if not artefact.exists():
        raise UserError(f"{artefact}: there is no such file or folder")
    for path in (artefact, *artefact.parents[:2]):
        text = (Path.cwd() / path).as_posix()
        for kind in sorted(LAYOUT, key=lambda kind: -len(re.sub(r"{\w+}", "", LAYOUT[kind]))):
            if match := _pattern(kind).fullmatch(text):
                names = match.groupdict()
                root = Path(names.pop("root"))
                return Located(root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else root, kind, names)
    raise UserError(
        f"{artefact}: is no artefact of a run; name a file below an output folder, as {LAYOUT['headline']}, or a "
        f"model folder, as {LAYOUT['model']}"
    )


@cache
def _pattern(kind: str) -> re.Pattern[str]:
    """The paths of a kind of artefact, with its wildcards as groups."""
    parts = re.split(r"{(\w+)}", LAYOUT[kind])
    groups = (f"(?P<{part}>[^/]+?)" if index % 2 else re.escape(part) for index, part in enumerate(parts))
    return re.compile(f"(?P<root>.*)/{''.join(groups)}")


@dataclass(frozen=True)
class Tracer:
    """Builds the tree of artefacts below one output folder; each stands in it whole once."""

    root: Path
    config: Config
    _shown: set[Path] = field(default_factory=set)

    def node(self, artefact: Located) -> Node:
        path = artefact.path
        if path in self._shown:
            return Node(f"{path} (as above)")
        self._shown.add(path)
        if artefact.kind == "model":
            return self._model(artefact)
        if artefact.kind in ("checkpoints", "responses", "code"):
            raise UserError(f"{path}: is no result of a step; trace what a step wrote when it had ended")
        speaker = Paths(self.root).of(_SPOKEN_FOR.get(artefact.kind, artefact.kind), **artefact.names)
        source = artifacts.provenance(speaker)
        if not {"step", "names", "config", "inputs", "versions"} <= source.keys() or source["step"] not in STEPS:
            raise UserError(f"{speaker}: says nothing of where it came from; run its step again")
        facts = (self._step(source), *_what_sampled(source), _versions(source["versions"]))
        if source["step"] == "report":
            return self._report(path, source, facts)
        inputs = tuple(self._input(source, role, sha) for role, sha in source["inputs"].items())
        if source["step"] == "problems":
            inputs = (Node(_source_of_problems(self.config.problems.get(source["names"]["problems"]))),)
        return Node(f"{path}", facts, inputs)

    def _model(self, artefact: Located) -> Node:
        """A model that was fetched or bootstrapped; its folder is what its digest says, and holds no provenance."""
        name = artefact.names["model"]
        source = self.config.models.get(name)
        title, facts = f"{artefact.path}", (f"step model, digest {artefact_digest(artefact.path)[:SHOWN_DIGITS]}",)
        start = source.bootstrap.start if source and source.bootstrap else None
        if start is None:
            return Node(title, facts, (Node(_source_of_model(name, source)),))
        first = Located(self.root, "model", {"model": start})
        described = Node(_source_of_model(name, source))
        missing = Node(f"{first.path}: GONE: there is no such folder")
        return Node(title, facts, (described, self.node(first) if first.path.is_dir() else missing))

    def _step(self, source: Mapping[str, Any]) -> str:
        step, names = source["step"], source["names"]
        present = digest(parameters(self.config, step, **names))
        options = "".join(f" --{name} {value}" for name, value in names.items())
        same = "as configured now" if present == source["config"] else f"CHANGED: the configuration now gives {present}"
        return f"step {step}{options}, parameters {source['config']} ({same})"

    def _input(self, source: Mapping[str, Any], role: str, sha: str) -> Node:
        """An input by its digest: the artefact of these bytes, or what there is instead."""
        expected, same = self._expected(source, role), self._by_digest.get(sha, [])
        if same:  # the weights after the last iteration are the trained model's too
            return self.node(next((one for one in same if expected and one.path == expected.path), same[0]))
        title = f"{expected.path if expected else role}: digest {sha[:SHOWN_DIGITS]} when it was read, "
        if expected is None or not expected.path.exists():
            return Node(title + "and GONE: no artefact here has it")
        now = artefact_digest(expected.path)[:SHOWN_DIGITS]
        return Node(title + f"and CHANGED since: it is {now} now; run step {source['step']} again")

    def _expected(self, source: Mapping[str, Any], role: str) -> Located | None:
        """Where an input of this role lies."""
        names = dict(source["names"])
        kind = "shard" if "-of-" in role else role
        if kind == "shard":
            names = {"shard": role}
        elif source["step"] == "validate" and kind != "model":
            kind = "problems" if role.startswith("problems-") else "weights_of_iteration"
            names |= {"problems": role.removeprefix("problems-"), "iteration": role}
        elif kind == "model" and names.get("run", jobs.INITIAL) != jobs.INITIAL and source["step"] == "evaluate":
            kind = "trained"
        elif kind in ("problems", "model"):
            names = {"model": self.config.solvability.model, "problems": self.config.solvability.problems, **names}
        needed = re.findall(r"{(\w+)}", LAYOUT[kind])
        return Located(self.root, kind, {name: names[name] for name in needed}) if names.keys() >= {*needed} else None

    def _report(self, path: Path, source: Mapping[str, Any], facts: tuple[str, ...]) -> Node:
        """A report has one digest of all that it read, which are the results of its configuration."""
        from halfmatch.report.results import collect

        read = collect(self.config.model_copy(update={"output": str(self.root)})).artefacts
        same = digest({artefact.path: artefact.sha256 for artefact in read}) == source["inputs"]
        state = f"made from these {len(read)} artefacts" if same else "CHANGED: not made from the artefacts as they are"
        nodes = tuple(self.node(locate(self.root / artefact.path)) for artefact in read)
        return Node(f"{path}", (*facts, state), nodes)

    @cached_property
    def _by_digest(self) -> dict[str, list[Located]]:
        """The artefacts below the output folder that steps read, by their digests."""
        kinds = ("problems", "model", "shard", "perfectible", "rollouts", "scores", "trained", "weights_of_iteration")
        patterns = {kind: re.sub(r"{\w+}", "*", LAYOUT[kind]) for kind in kinds}
        found = [path for kind in kinds for path in sorted(self.root.glob(patterns[kind]))]
        located = [locate(path) for path in found if not path.name.startswith(".")]
        by_digest: dict[str, list[Located]] = {}
        for artefact in located:
            if artefact.kind in kinds:
                by_digest.setdefault(artefact_digest(artefact.path), []).append(artefact)
        return by_digest


def _what_sampled(source: Mapping[str, Any]) -> Iterator[str]:
    engine = source.get("engine")
    if engine:
        yield "engine " + ", ".join(f"{key} {value}" for key, value in sorted(engine.items()))


def _versions(recorded: Mapping[str, str]) -> str:
    """The versions an artefact was made with, beside those that are installed where they differ."""
    return "versions " + ", ".join(
        f"{package} {version}" if _installed(package) == version else f"{package} {version} (now {_installed(package)})"
        for package, version in sorted(recorded.items())
    )


def _installed(package: str) -> str:
    try:
        return __version__ if package == "halfmatch" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _source_of_problems(source: ProblemSource | None) -> str:
    if source is None:
        return "a problem set that the configuration does not have now"
    if source.source == "generator":
        return f"the built-in generator, products of {source.lowest_factor} to {source.highest_factor}, {source.split}"
    return f"file {source.path}" if source.source == "file" else f"hub dataset {source.id}@{source.revision}"


def _source_of_model(name: str, source: ModelSource | None) -> str:
    if source is None:
        return f"a model {name} that the configuration does not have now"
    if source.bootstrap is not None:
        return f"bootstrapped here as models.{name}.bootstrap says"
    if source.source == "hub":
        return f"hub model {source.id}@{source.revision}"
    return f"{source.source} {source.path or source.package}"
