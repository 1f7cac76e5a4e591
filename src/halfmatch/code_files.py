"""Which source files a step runs: what it imports from this package, and what that imports, read off the source.

Rules and stages have one file with the checksums of these as an input, so that a changed trainer trains again and a
changed figure does not. The modules below bring a step its parameters and tell how far it is; what they pass on is
compared as parameters.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
_PASS_ON = frozenset(
    f"halfmatch{name}"
    for name in (
        *("", ".cli", ".config", ".config_checks", ".config_files", ".config_section"),
        *(".errors", ".paths", ".progress", ".steps"),
    )
)


@cache
def code_files(step: str) -> tuple[Path, ...]:
    """The source files that a step runs, below the package's folder, sorted; templates and styles included."""
    reached: set[str] = set()
    waiting = [f"halfmatch.steps.{step}"]
    while waiting:
        module = waiting.pop()
        if module in reached or module in _PASS_ON:
            continue
        reached.add(module)
        waiting += _imported(_source(module))
        package = module.rpartition(".")[0]
        if _source(package).is_file():  # importing a module runs its package's too, where that has code
            waiting.append(package)
    files = {_source(module) for module in reached}
    data = {file for source in files if source.name == "__init__.py" for file in _data_files(source.parent)}
    return tuple(sorted(file.relative_to(PACKAGE) for file in files | data))


def checksums(step: str) -> str:
    """The source files of a step, each with its SHA-256, as `sha256sum` writes and checks them from the repository."""
    lines = (
        f"{hashlib.sha256((PACKAGE / file).read_bytes()).hexdigest()}  src/halfmatch/{file.as_posix()}\n"
        for file in code_files(step)
    )
    return "".join(lines)


def _source(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _imported(source: Path) -> tuple[str, ...]:
    """The modules of this package that a source file imports, at its top or inside of functions."""
    return tuple(_walked(source))


def _walked(source: Path) -> Iterator[str]:
    for node in _statements(ast.parse(source.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "halfmatch" and _source(name).is_file())


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements and those inside of them; expressions, most of a tree, hold none and are not looked through."""
    for node in nodes:
        yield node
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, inside, ()))


def _data_files(package: Path) -> Iterator[Path]:
    """The files below a package that are not Python: templates, styles."""
    for file in package.rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyc") and not file.name.startswith("."):
            yield file
