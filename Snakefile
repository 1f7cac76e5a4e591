# The pipeline of halfmatch: problems and models, solve rates, offline mismatch, training matrix, evaluation, report.
#
#   snakemake                                        config/config.yaml, the laptop run
#   snakemake --configfile config/smollm2.yaml       another configuration; more files are layers over the first
#   snakemake -- mismatch_all                        a part: see the targets at the end
#   snakemake -- record                              all, and tell DVC what was made
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# This checkout's package, also in a job and in a temporary copy, whatever is installed.
sys.path.insert(0, str(Path(workflow.basedir) / "src"))

from halfmatch import profiles
from halfmatch.errors import UserError
from halfmatch.pipeline import Pipeline

try:
    profiles.check(sys.argv[1:], Path(workflow.basedir))
    pipeline = Pipeline.read(
        workflow.config_settings.configfiles, workflow.config_settings.config
    )
except UserError as error:
    raise WorkflowError(str(error)) from None
pipeline.write_files()

# The commands of this environment, also without activating it. A prefix replaces Snakemake's own, which is its first line.
shell.prefix(
    "set -euo pipefail; "
    f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH PYTHONPATH=src; "
)


# Only with --software-deployment-method apptainer; the environment is otherwise the one that Snakemake runs in.
container: "docker://python:3.11-slim"


wildcard_constraints:
    problems="[A-Za-z0-9][A-Za-z0-9.-]*",
    model="[A-Za-z0-9][A-Za-z0-9.-]*",
    rollout="[A-Za-z0-9][A-Za-z0-9.-]*",
    train="[A-Za-z0-9][A-Za-z0-9.-]*",
    engine="transformers|vllm|trainer",
    shard=r"\d+-of-\d+",
    run=r"initial|[A-Za-z0-9.-]+_[A-Za-z0-9.-]+_seed\d+",


localrules:
    all,
    problems_all,
    model_all,
    perfectible_all,
    mismatch_all,
    train_all,
    evaluate_all,
    validate_all,
    record,


rule all:
    default_target: True
    input:
        pipeline.results("report"),


include: "rules/problems.smk"
include: "rules/model.smk"
include: "rules/solvability.smk"
include: "rules/mismatch.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/validate.smk"
include: "rules/report.smk"
include: "rules/targets.smk"


onerror:
    print(
        f"Some jobs failed; their logs are named above. What does not depend on them is done, and\n"
        f"  halfmatch report --config {pipeline.file}\n"
        f"makes a report of it that names what is missing."
    )
