"""What can be asked of a measurement, and the command line that asks it. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from halfmatch.config import EngineName, EngineSettings, PromptTemplate
from halfmatch.errors import UserError
from halfmatch.precision import DType, Fp32Module

HELP = "measure the mismatch of a model of yours, or of rollouts that others made; needs no configuration"


@dataclass(frozen=True)
class Settings:
    """What to measure, and how."""

    output: Path
    model: str | None = None
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(slots=16))
    rollout_dtypes: tuple[DType, ...] = ("bf16", "fp16")
    train_dtypes: tuple[DType, ...] | None = None  # None: each rollout dtype is scored in itself
    fp32_modules: tuple[Fp32Module, ...] = ()
    rollouts: Path | None = None  # made by others
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt_file: Path | None = None
    problems: str | None = None
    template: PromptTemplate | None = None
    count: int = 16  # prompts
    samples: int = 2
    temperature: float = 1.0
    max_tokens: int = 128
    seed: int = 0
    confidence: float = 0.95
    bootstrap_samples: int = 1000


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of `halfmatch measure`."""
    dtypes, default = get_args(DType), Settings(Path())
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file, package:NAME (a Python package that ships one), or ORG/NAME[@COMMIT] of the hub",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: results/measure/NAME")

    prompts = parser.add_argument_group("prompts (default: sums that are built in)").add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE", help="your own: JSONL, JSON or Parquet, a prompt a row"
    )
    prompts.add_argument(
        "--problems",
        metavar="SET",
        help="generator, a file with columns problem and answer, or ORG/NAME[@COMMIT][:SPLIT]",
    )
    prompts.add_argument("--from", dest="rollouts", type=Path, metavar="FILE", help="rollouts that others made")
    parser.add_argument(
        "--columns",
        nargs="+",
        default=[],
        metavar="OURS=THEIRS",
        help="with --from: columns by names that are not known, as in logprobs=my_logps",
    )
    parser.add_argument(
        "--template", choices=get_args(PromptTemplate), help="default: chat where the tokenizer has a chat template"
    )
    parser.add_argument("--count", type=_positive, default=default.count, metavar="N", help="prompts (%(default)s)")
    parser.add_argument(
        "--samples", type=_positive, default=default.samples, metavar="N", help="responses a prompt (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=_positive, default=default.max_tokens, metavar="N", help="longest response (%(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of the rollouts, made here or by others (%(default)s)",
    )

    parser.add_argument(
        "--rollout-dtypes", nargs="+", choices=dtypes, default=list(default.rollout_dtypes), help="default: bf16 fp16"
    )
    parser.add_argument(
        "--train-dtypes", nargs="+", choices=dtypes, help="score in each of these; default: in the rollouts' own"
    )
    parser.add_argument(
        "--fp32-modules", nargs="+", choices=get_args(Fp32Module), default=[], help="parts in fp32 on both sides"
    )

    parser.add_argument("--engine", choices=get_args(EngineName), help="default: vllm on a GPU, transformers on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--slots", type=_positive, default=default.engine.slots, metavar="N", help="sequences at once")
    parser.add_argument("--tensor-parallel", type=_positive, default=1, metavar="N", help="vllm: GPUs a replica")
    parser.add_argument("--data-parallel", type=_positive, default=1, metavar="N", help="replicas of the engine")
    parser.add_argument("--server", metavar="URL", help="vllm: a running server that samples")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and samples (%(default)s)")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of the intervals (%(default)s)")


def settings(options: argparse.Namespace) -> Settings:
    """The options as settings; UserError for what does not go together."""
    if options.model is None and options.rollouts is None:
        raise UserError("give a MODEL, or rollouts that others made (--from FILE)")
    if options.columns and options.rollouts is None:
        raise UserError("--columns goes with --from")
    if not 0.5 < options.confidence < 1:
        raise UserError(f"--confidence {options.confidence}: a number between 0.5 and 1 is needed")
    if not 0 < options.temperature <= 10:
        raise UserError(f"--temperature {options.temperature}: a number above 0, at most 10, is needed")
    return Settings(
        output=options.output or Path("results/measure") / _name(options),
        model=options.model,
        engine=_engine(options),
        rollout_dtypes=tuple(dict.fromkeys(options.rollout_dtypes)),
        train_dtypes=tuple(dict.fromkeys(options.train_dtypes)) if options.train_dtypes else None,
        fp32_modules=tuple(options.fp32_modules),
        rollouts=options.rollouts,
        columns=_columns(options.columns),
        prompt_file=options.prompts,
        problems=options.problems,
        template=options.template,
        count=options.count,
        samples=options.samples,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
        confidence=options.confidence,
    )


def _name(options: argparse.Namespace) -> str:
    from halfmatch.measure.sources import name_of

    return name_of(options.model or str(options.rollouts))


def _engine(options: argparse.Namespace) -> EngineSettings:
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = options.engine or ("vllm" if device == "cuda" or options.server else "transformers")
    return EngineSettings(
        name=name,
        device=device,
        slots=max(8, options.slots),
        tensor_parallel=options.tensor_parallel,
        data_parallel=options.data_parallel,
        server=options.server,
    )


def _columns(pairs: list[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        ours, separator, theirs = pair.partition("=")
        if not (ours and separator and theirs):
            raise UserError(f"--columns {pair}: write it as OURS=THEIRS, as in logprobs=my_logps")
        columns[ours] = theirs
    return columns


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: a whole number of 1 or more is needed")
    return number
