"""Where the numbers come from: versions, dtypes really used, settings, files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmatch import jobs, plan
from halfmatch.config import Config
from halfmatch.config_files import load
from halfmatch.paths import Run
from halfmatch.report.numbers import NOTHING
from halfmatch.report.results import Artefact, Results
from halfmatch.report.tables import Table
from halfmatch.steps import STEPS, parameters

PAPER_PRESET = Path("config/paper.yaml")

# What every artefact says of itself; the rest is what its step found out when it ran.
_COMMON = ("table", "schema_version", "step", "names", "config", "inputs", "versions")


def versions(results: Results) -> Table:
    """The packages that made the artefacts; more than one version of one is worth knowing."""
    found: dict[str, set[str]] = defaultdict(set)
    for artefact in results.artefacts:
        for package, version in artefact.provenance.get("versions", {}).items():
            found[package].add(version)
    return Table(
        "versions",
        "Packages that the artefacts were made with",
        ("package", "version"),
        tuple((package, " and ".join(sorted(found[package]))) for package in sorted(found)),
    )


def computed_in(results: Results) -> Table:
    """What trainers and engines say that they really computed in."""
    groups: dict[tuple[str, str, str], int] = defaultdict(int)
    for artefact in results.artefacts:
        details = {key: value for key, value in artefact.provenance.items() if key not in _COMMON}
        if details:
            step = str(artefact.provenance.get("step", NOTHING))
            groups[step, _precision(artefact.provenance.get("names", {})), _text(details)] += 1
    return Table(
        "computed-in",
        "What really computed, as each step recorded it",
        ("step", "precision", "files", "recorded"),
        tuple((step, precision, str(count), text) for (step, precision, text), count in sorted(groups.items())),
        heads=2,
    )


def _precision(names: Mapping[str, str]) -> str:
    run = names.get("run", "")
    trained = Run.parse(run).precision if "_" in run else ""
    return names.get("train") or names.get("rollout") or trained or NOTHING


def _text(details: Mapping[str, Any]) -> str:
    flat: dict[str, Any] = {}
    for key, value in details.items():
        flat |= {f"{key}.{part}": item for part, item in value.items()} if isinstance(value, dict) else {key: value}
    return "; ".join(f"{key} {_plain(value)}" for key, value in sorted(flat.items()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def artefacts(results: Results) -> Table:
    """Every file that the report was made from, by the digest of its bytes."""
    return Table(
        "artefacts",
        "Files that this report was made from",
        ("file", "SHA-256", "step", "digest of its configuration"),
        tuple((one.path, one.sha256, *_step(one)) for one in results.artefacts),
    )


def _step(artefact: Artefact) -> tuple[str, str]:
    return (str(artefact.provenance.get("step", NOTHING)), str(artefact.provenance.get("config", NOTHING)))


def settings(results: Results) -> Table:
    """What the jobs of this run depend on. What they do not, such as memory to use or a folder to write to, is no part
    of a result, nor of its report."""
    return Table(
        "settings",
        "Settings",
        ("key", "value"),
        tuple((key, _plain(value)) for key, value in sorted(_parameters(results.config).items())),
    )


def differences(results: Results, preset: Path) -> list[str] | None:
    """How these settings differ from the paper's; None where its preset is not at hand."""
    if not preset.is_file():
        return None
    known = tuple(_parameters(results.config))
    lines = plan.differences(results.config, load([preset]), plan.preset_sources(preset))
    return [line for line in lines if line.partition(":")[0].startswith(known)]


def _parameters(config: Config) -> dict[str, Any]:
    """The parameters of all jobs, by their keys in the configuration."""
    return {
        key: value
        for step in STEPS
        for job in jobs.jobs(config, step)
        for key, value in parameters(config, step, **job).items()
    }
