"""The command line: quick to answer, one clear line for what the user can mend, bugs as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halfmatch import cli
from halfmatch.config import Config
from halfmatch.errors import UserError
from halfmatch.steps import STEPS


def test_there_is_a_command_for_every_step_with_its_wildcards_as_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name, step in STEPS.items():
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        for option in ("config", *step.wildcards):
            assert f"--{option}" in text


def test_help_imports_nothing_heavy() -> None:
    command = (
        "import sys\nfrom halfmatch import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} "
        "& {'torch', 'transformers', 'vllm', 'datasets', 'math_verify', 'matplotlib', 'pyarrow', 'scipy', 'numpy'}))"
    )
    output = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_what_the_user_can_mend_is_one_message_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("sead: 1\n", encoding="utf-8")
    assert cli.main(["plan", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error == f"halfmatch plan: {file}: the configuration is not valid\n  sead: unknown key; did you mean seed?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["problems", "--problems", "trian"],
            "--problems trian: the configuration has no such name; did you mean train?",
        ),
        (["model", "--model", "gain12"], "--model gain12: the configuration has no such name; did you mean gain120?"),
        (["train", "--run", "fp16_grpo_seed7"], "did you mean fp16_grpo_seed"),
        (["solvability", "--shard", "0-of-7"], "did you mean 0-of-2?"),
    ],
)
def test_a_name_that_is_not_in_the_configuration_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_bugs_are_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: str, config: Config, **wildcards: str) -> None:
        raise ZeroDivisionError(step)

    monkeypatch.setattr(cli, "run", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["perfectible"])


def test_a_step_gets_the_layered_configuration_and_its_wildcards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(cli, "run", lambda step, config, **wildcards: calls.append((step, config.seed, wildcards)))
    for name, text in (("a.yaml", "seed: 1\n"), ("b.yaml", "seed: 2\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    assert cli.main(["problems", "--config", *files, "--problems", "train"]) == 0
    assert calls == [("problems", 2, {"problems": "train"})]


def test_a_user_error_of_a_step_ends_in_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(step: str, config: Config, **wildcards: str) -> None:
        raise UserError("nothing to keep")

    monkeypatch.setattr(cli, "run", refuse)
    assert cli.main(["perfectible"]) == 2
    assert capsys.readouterr().err == "halfmatch perfectible: nothing to keep\n"


def test_config_prints_what_it_read_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("training: {iterations: 7}\n", encoding="utf-8")
    assert cli.main(["config", "--config", str(tmp_path / "a.yaml")]) == 0
    text = capsys.readouterr().out
    assert "  iterations: 7\n" in text
    assert "  # rounds of sampling and training\n" in text
