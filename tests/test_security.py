"""What comes from elsewhere, models and what they write, runs no code, reaches no network and sees no secrets."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from halfmatch.code_files import PACKAGE
from halfmatch.grading import RULES, Grader

if TYPE_CHECKING:
    from conftest import TinyRun

SOURCES = sorted(PACKAGE.rglob("*.py"))


# ------------------------------------------------------------------------------------------------------------- secrets
def test_secrets_of_the_environment_reach_neither_messages_nor_artefacts(tiny_run: TinyRun) -> None:
    files = [path for path in tiny_run.folder.rglob("*") if path.is_file()]
    assert len(files) > 40  # artefacts, model folders, checkpoints, figures
    texts = {"messages": tiny_run.messages.encode(), **{str(path): path.read_bytes() for path in files}}
    for secret in tiny_run.secrets.values():
        assert [name for name, text in texts.items() if secret.encode() in text] == []


# ---------------------------------------------------------------------------------------------------------------- code
def _calls(source: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _settings(call: ast.Call) -> dict[str | None, Any]:
    return {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}


def test_no_code_of_a_model_is_ever_trusted() -> None:
    given_to = [
        _settings(call)["trust_remote_code"]
        for source in SOURCES
        for call in _calls(source)
        if "trust_remote_code" in _settings(call)
    ]
    assert len(given_to) >= 3
    assert set(given_to) == {False}


def test_no_pickle_is_ever_loaded() -> None:
    calls = [(source.name, call) for source in SOURCES for call in _calls(source)]
    assert len(calls) > 1000
    forbidden = {"eval", "exec", "os.system"} | {
        f"{module}.load" for module in ("torch", "pickle", "joblib", "numpy", "np")
    }
    assert [(name, _name(call)) for name, call in calls if _name(call) in forbidden] == []


def test_no_shell_is_given_a_text() -> None:
    assert not [source for source in SOURCES for call in _calls(source) if _settings(call).get("shell")]


# ------------------------------------------------------------------------------------------------------------- graders
ATTACKS = [
    "__import__('os').mkdir('ran')",
    "().__class__.__base__.__subclasses__()",
    "\\text{__import__('os').mkdir('ran')}",
    "[__import__('os').mkdir('ran') for x in (1,)]",
    "exec(\"import os; os.mkdir('ran')\")",
    "lambda: __import__('os').mkdir('ran')",
    "\\input{/etc/passwd}",
]


def test_answers_are_read_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rule in RULES:
        responses = [
            (text, "777", False)
            for attack in ATTACKS
            for text in (
                attack,
                f"= {attack}",
                f"</think> \\boxed{{{attack}}}",
                f"\\boxed{{5 + {attack}}}",
                f"${attack}$",
            )
        ]
        with Grader(rule, timeout_s=20) as grader:
            assert "correct" not in {verdict.label for verdict in grader.grade_many(responses)}
    assert list(tmp_path.iterdir()) == []


# What a grading process does first; then it tries this machine's own address, the nearest there is.
_REACH = """
import socket, sys
from halfmatch.grading.worker import leave_the_network
print("left" if leave_the_network() else "stayed")
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10).close()
    print("reached")
except OSError as error:
    print(error)
"""


def test_a_grading_process_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", _REACH, port]
        left, outcome = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    if left == "stayed":
        pytest.skip("this system gives no process a network of its own")
    assert "unreachable" in outcome
