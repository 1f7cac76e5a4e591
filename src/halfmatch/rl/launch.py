"""Start the ranks of a training run: one process a GPU on this machine, joined with those of other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from halfmatch.config import Training
from halfmatch.errors import UserError

RENDEZVOUS = "HALFMATCH_RENDEZVOUS"
PORT = 29400


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or `start`, has started this process as one of several."""
    return "LOCAL_RANK" in environment and "WORLD_SIZE" in environment


def start(settings: Training, arguments: Sequence[str]) -> int:
    """Run `halfmatch` with these arguments once a rank, and wait; returns 0 or the exit status of what failed first."""
    launch = elastic_launch(launch_config(settings), sys.executable)
    try:
        launch("-m", "halfmatch", *arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def launch_config(settings: Training, environment: Mapping[str, str] = os.environ) -> LaunchConfig:
    """How many processes start here, and where they meet the others."""
    return LaunchConfig(
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        nproc_per_node=settings.ranks // settings.nodes,
        run_id=environment.get("SLURM_JOB_ID", "halfmatch"),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if settings.nodes == 1 else rendezvous(environment),
        max_restarts=0,  # a run goes on from its checkpoint when it is started again
    )


def rendezvous(environment: Mapping[str, str]) -> str:
    """Where the processes of several machines meet, as host:port: `HALFMATCH_RENDEZVOUS`, or the first node of the
    Slurm job."""
    if given := environment.get(RENDEZVOUS):
        return given
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError(
            f"training.nodes is more than 1, and nothing says where they meet: start `halfmatch train` once on every "
            f"node, by `srun --ntasks-per-node 1` in a Slurm job or with {RENDEZVOUS}=host:port in the environment"
        )
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True).stdout
    return f"{listed.split()[0]}:{PORT}"
