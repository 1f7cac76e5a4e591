import pytest

from halfmatch.config import Training
from halfmatch.errors import UserError
from halfmatch.rl import launch


def test_one_machine_meets_at_home():
    config = launch.launch_config(Training(ranks=4), {})
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 4)
    assert config.rdzv_endpoint == "localhost:0"


def test_ranks_are_spread_over_nodes_which_meet_where_the_environment_says():
    config = launch.launch_config(Training(ranks=16, nodes=2), {"HALFMATCH_RENDEZVOUS": "node7:1234"})
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert config.rdzv_endpoint == "node7:1234"


def test_nodes_of_a_slurm_job_meet_at_its_first(monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\ntest "$*" = "show hostnames gpu[3-4]" && printf "gpu3\\ngpu4\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    config = launch.launch_config(
        Training(ranks=2, nodes=2), {"SLURM_JOB_NODELIST": "gpu[3-4]", "SLURM_JOB_ID": "812", "PATH": str(tmp_path)}
    )
    assert config.rdzv_endpoint == f"gpu3:{launch.PORT}"
    assert config.run_id == "812"


def test_several_nodes_that_nobody_can_find_are_an_error():
    with pytest.raises(UserError, match="HALFMATCH_RENDEZVOUS=host:port"):
        launch.launch_config(Training(ranks=2, nodes=2), {})


def test_ranks_that_do_not_divide_into_nodes_are_refused():
    with pytest.raises(ValueError, match="ranks 3 do not divide into nodes 2"):
        Training(ranks=3, nodes=2)


def test_a_process_that_torchrun_started_starts_no_more():
    assert launch.is_rank({"LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    assert not launch.is_rank({})
