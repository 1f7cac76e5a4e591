"""The command line: one command a step, and a few about the whole. Torch is imported by the steps that need it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from halfmatch import __version__
from halfmatch.config import Config
from halfmatch.errors import UserError, nearest, refusal
from halfmatch.measure import options as measure_options
from halfmatch.steps import STEPS, run

_STEP_HELP = {
    "problems": "read one problem set",
    "model": "fetch or make one model",
    "solvability": "sample one shard of the problems to learn their solve rates",
    "perfectible": "keep the problems that the model solves sometimes",
    "rollouts": "sample responses in one rollout dtype, for the offline mismatch",
    "scores": "score the same tokens with the trainer in one dtype",
    "mismatch": "measure the mismatch of rollouts and scores",
    "fidelity": "compare the gradients of the objectives with fp32's",
    "origin": "trace the mismatch to layers and operations, against float64",
    "train": "train one run of the matrix",
    "evaluate": "score one set of weights on one benchmark",
    "validate": "score the weights that a run kept along its training, on every benchmark",
    "report": "figures, tables and the page",
}
_WILDCARD_HELP = {
    "problems": "problem set, by its name in the configuration",
    "model": "model, by its name in the configuration",
    "shard": "shard, as in 0-of-2",
    "engine": "rollout engine",
    "rollout": "precision whose rollout dtype is sampled in, by its name in the configuration",
    "train": "precision whose compute dtype scores, by its name in the configuration",
    "run": "run of the matrix, as in bf16_grpo_seed0; for evaluate also initial, the untrained model",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 for success, 2 with one clear message for what the user can mend. Bugs raise."""
    options = _parser().parse_args(arguments)
    # Parallelism is over jobs, and one thread a process keeps the order of every sum: set before torch is imported.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command: Callable[[argparse.Namespace], None] = options.command
        command(options)
    except UserError as error:
        print(f"halfmatch {options.name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `halfmatch plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that may not be written to
        if (refused := refusal(error)) is None:
            raise
        print(f"halfmatch {options.name}: {refused}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halfmatch",
        description="Reproduce, measure and remove the training-inference mismatch in RL fine-tuning.",
    )
    parser.add_argument("--version", action="version", version=f"halfmatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, text: str, command: Callable[[argparse.Namespace], None], takes_config: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.set_defaults(command=command, name=name)
        if takes_config:
            sub.add_argument(
                "--config",
                nargs="+",
                type=Path,
                default=[],
                metavar="FILE",
                help="YAML files, a later one over the earlier ones; without any, the laptop run",
            )
        return sub

    for name, step in STEPS.items():
        sub = add(name, _STEP_HELP[name], _run_step)
        for wildcard in step.wildcards:
            sub.add_argument(f"--{wildcard}", required=True, metavar="NAME", help=_WILDCARD_HELP[wildcard])

    plan = add("plan", "say what a configuration would run, and how it differs from the paper", _plan)
    plan.add_argument(
        "--paper", type=Path, default=Path("config/paper.yaml"), metavar="FILE", help="preset to compare with"
    )
    add("doctor", "say what this machine has, what each step would use, and what is missing", _doctor)
    add("headline", "print the headline table of a finished report", _headline)
    add("objectives", "say what each objective computes, its settings and its source", _objectives, takes_config=False)
    traced = add("trace", "say where an artefact came from: step, configuration, inputs, versions, sources", _trace)
    traced.add_argument("artefact", type=Path, help="a file or model folder below an output folder")
    measure_options.add_to(add("measure", measure_options.HELP, _measure, takes_config=False))
    add("code", "write the checksums of the source files of each step, which its jobs have as an input", _code)
    exported = add("export", "write a checkpoint of a run as a model folder", _export)
    exported.add_argument("--run", required=True, metavar="NAME", help=_WILDCARD_HELP["run"].partition(";")[0])
    exported.add_argument(
        "--iteration", type=int, metavar="N", help="checkpoint after so many iterations; else the last"
    )
    exported.add_argument("folder", type=Path, help="new folder to write to")
    restore = add(
        "restore", "after `dvc pull` or `dvc checkout`: tell Snakemake that the results are up to date", _restore
    )
    restore.set_defaults(config=[])
    config = add("config", "check a configuration, and print it in full", _config)
    config.add_argument(
        "--as",
        dest="form",
        choices=("yaml", "schema", "reference", "stages"),
        default="yaml",
        help="yaml (with what every key means), its JSON schema, a Markdown table of all keys, or dvc.yaml",
    )
    return parser


def _load(options: argparse.Namespace) -> Config:
    from halfmatch.config_files import load

    return load(options.config)


def _run_step(options: argparse.Namespace) -> None:
    config = _load(options)
    wildcards = {wildcard: getattr(options, wildcard) for wildcard in STEPS[options.name].wildcards}
    for wildcard, name in wildcards.items():
        known = _known(config, wildcard)
        if name not in known:
            raise UserError(f"--{wildcard} {name}: the configuration has no such name; {nearest(name, known)}")
    if options.name == "train" and config.training is not None and config.training.ranks > 1:
        from halfmatch.rl import launch

        if not launch.is_rank():
            arguments = ["train", "--config", *map(str, options.config), "--run", options.run]
            if status := launch.start(config.training, arguments):
                raise SystemExit(status)
            return
    run(options.name, config, **wildcards)


def _known(config: Config, wildcard: str) -> list[str]:
    """The names that an option of a step can take."""
    from halfmatch import jobs

    if wildcard == "engine":
        return ["transformers", "vllm", jobs.TRAINER]
    if wildcard == "shard":
        return jobs.shards(config)
    if wildcard == "run":
        return [jobs.INITIAL, *(run.name for run in jobs.runs(config))]
    if wildcard == "problems":
        return list(config.problems)
    return list(config.models if wildcard == "model" else config.precisions)


def _plan(options: argparse.Namespace) -> None:
    from halfmatch.plan import plan

    print(plan(_load(options), options.paper))


def _doctor(options: argparse.Namespace) -> None:
    from halfmatch.doctor import diagnosis

    text, missing = diagnosis(_load(options))
    print(text)
    needed = [part.what for part in missing if part.needed]
    if needed:
        raise UserError(f"this configuration needs what is missing here: {', '.join(needed)}")


def _headline(options: argparse.Namespace) -> None:
    from halfmatch.report.headline import table

    print(table(_load(options)))


def _trace(options: argparse.Namespace) -> None:
    from halfmatch.trace import trace

    print(trace(options.artefact, options.config))


def _objectives(_: argparse.Namespace) -> None:
    from halfmatch.rl.objective_table import table

    print(table())


def _measure(options: argparse.Namespace) -> None:
    from halfmatch.measure.measurement import run as measure

    print(measure(measure_options.settings(options)))


def _code(options: argparse.Namespace) -> None:
    from halfmatch.pipeline import Pipeline

    Pipeline(_load(options), tuple(options.config)).write_files()


def _export(options: argparse.Namespace) -> None:
    from halfmatch import jobs

    config, known = _load(options), [run.name for run in jobs.runs(_load(options))]
    if options.run not in known:
        raise UserError(f"--run {options.run}: the configuration has no such name; {nearest(options.run, known)}")
    from halfmatch.rl.export import export

    print(f"{export(config, options.run, options.iteration, options.folder)} → {options.folder}")


def _restore(options: argparse.Namespace) -> None:
    from halfmatch.restore import restore

    restore()


def _config(options: argparse.Namespace) -> None:
    from halfmatch import config_files

    config = _load(options)
    if options.form == "schema":
        print(config_files.to_schema(), end="")
    elif options.form == "reference":
        print(config_files.to_reference(), end="")
    elif options.form == "stages":
        from halfmatch.stages import to_dvc_yaml

        print(to_dvc_yaml(config), end="")
    else:
        print(config_files.to_yaml(config), end="")


if __name__ == "__main__":
    sys.exit(main())
