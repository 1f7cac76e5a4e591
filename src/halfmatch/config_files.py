"""Configuration files: reading them in layers, and writing one out with what every key means.

Everything that is wrong with a file is told at once, a line each, with the path of the key and what to do.
"""

from __future__ import annotations

import json
import re
import reprlib
import textwrap
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from halfmatch.config import Config
from halfmatch.errors import UserError, nearest

WIDTH = 120
# Values in messages, cut: a few lines of YAML aliases stand for gigabytes.
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 2, 80, 80
_SCHEMA_LINE = "# yaml-language-server: $schema=../workflow/schemas/config.schema.json\n"


class _Loader(yaml.SafeLoader):
    """YAML with two traps closed: a key that stands twice is an error, and 1e-6 is a number, as YAML 1.2 says."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise UserError(f"line {line}: a {type(key).__name__} stands where a key is needed")
            if key in first_lines:
                raise UserError(f"line {line}: the key {key!r} stands twice (first in line {first_lines[key]})")
            first_lines[key] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


# ------------------------------------------------------------------------------------------------------------ reading
def load(paths: Sequence[Path]) -> Config:
    """Read files in layers: a later one changes or adds keys of the earlier ones. UserError names all that is wrong."""
    values: dict[str, Any] = {}
    for path in paths:
        values = _layered(values, read_yaml(Path(path)))
    return validate(values, ", ".join(str(path) for path in paths))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, where a YAML file is needed") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error})") from None
    except UserError as error:
        raise UserError(f"{path}, {error}") from None
    except RecursionError:
        raise UserError(f"{path}: brackets are nested too deeply for a configuration") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError where what looks like a date or a number is none
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, where `key: value` lines are needed")
    return content


def _layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both_nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _layered(merged[key], value) if both_nested else value
    return merged


def validate(values: Mapping[str, Any], name: str) -> Config:
    """The configuration of these values; UserError lists everything that is wrong with them."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        details = error.errors()
        # A list whose items are wrong is also said to be too short.
        parents = {detail["loc"][:length] for detail in details for length in range(len(detail["loc"]))}
        details = [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in parents]
        lines = [line for detail in details for line in _explanations(detail)]
        raise UserError(
            "\n".join([f"{name}: the configuration is not valid", *(f"  {line}" for line in lines)])
        ) from None


def _explanations(detail: Any) -> Iterator[str]:
    """What one error of pydantic means for someone who edits the file."""
    parts = [str(part) for part in detail["loc"] if part != "[key]"]
    location = [part if part and part.isprintable() else repr(part) for part in parts]
    path = ".".join(location)
    if detail["type"] == "extra_forbidden":
        known = _keys_at(location[:-1])
        yield f"{path}: unknown key; {nearest(location[-1], known)}"
    elif detail["type"] == "missing":
        yield f"{path}: is missing"
    elif detail["type"] == "model_type":
        yield f"{path}: needs `key: value` lines, not {_SHOWN.repr(detail['input'])}"
    elif detail["type"] == "value_error":
        for line in str(detail["ctx"]["error"]).splitlines():
            yield f"{path}: {line}" if path else line
    elif detail["loc"] and detail["loc"][-1] == "[key]":
        yield f"{path}: names are letters, digits, dots and hyphens, and begin with a letter or digit"
    else:
        message = detail["msg"][0].lower() + detail["msg"][1:]
        yield f"{path}: {message}, not {_SHOWN.repr(detail['input'])}"


def _keys_at(location: Sequence[str]) -> list[str]:
    """The keys that the section at this place has."""
    annotation: Any = Config
    for part in location:
        section = _section(annotation)
        annotation = section.model_fields[part].annotation if section is not None else _value_type(annotation)
    section = _section(annotation)
    return list(section.model_fields) if section is not None else []


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _section(annotation: Any) -> type[BaseModel] | None:
    for alternative in _alternatives(annotation):
        if isinstance(alternative, type) and issubclass(alternative, BaseModel):
            return alternative
    return None


def _value_type(annotation: Any) -> Any:
    """The type of a mapping's values."""
    for alternative in _alternatives(annotation):
        if typing.get_origin(alternative) is dict:
            return typing.get_args(alternative)[1]
    return Any


# ------------------------------------------------------------------------------------------------------------ writing
def to_yaml(config: Config) -> str:
    """The whole configuration as a file: every key with its description, so that `load` of it gives the same again."""
    described: set[tuple[type[BaseModel], str]] = set()
    return _SCHEMA_LINE + "".join(_section_lines(config, 0, described, top=True))


def _section_lines(
    section: BaseModel, indent: int, described: set[tuple[type[BaseModel], str]], top: bool = False, brief: bool = False
) -> Iterator[str]:
    """A section's keys. Where sections of one kind stand side by side (brief), what is left out or like its default and
    a section of its own stays out, and only the first of each key is described."""
    margin = " " * indent
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        is_default = not field.is_required() and value == field.get_default(call_default_factory=True)
        if brief and is_default and (value is None or isinstance(value, BaseModel)):
            continue
        if top and indent == 0:
            yield "\n"
        if (type(section), key) not in described:
            described.add((type(section), key))
            for line in textwrap.wrap(field.description or "", WIDTH - indent - 2, break_on_hyphens=False):
                yield f"{margin}# {line}\n"
        if isinstance(value, BaseModel):
            yield f"{margin}{key}:\n"
            yield from _section_lines(value, indent + 2, described, brief=brief)
        elif isinstance(value, dict) and value and all(isinstance(item, BaseModel) for item in value.values()):
            yield f"{margin}{key}:\n"
            for name, item in value.items():
                yield f"{margin}  {_scalar(name)}:\n"
                yield from _section_lines(item, indent + 4, described, brief=True)
        else:
            yield f"{margin}{key}: {_scalar(section.model_dump(mode='json')[key])}\n"


def _scalar(value: Any) -> str:
    return (
        yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
        .removesuffix("...\n")
        .rstrip("\n")
    )


def to_schema() -> str:
    """The JSON schema of the configuration, for editors."""
    return json.dumps(Config.model_json_schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def to_reference() -> str:
    """Every key with its type, default and meaning, as a Markdown table."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{path}` | {default} | {text.replace('|', chr(92) + '|')} |" for path, default, text in _reference(Config)
    ]
    return "\n".join(rows) + "\n"


def _reference(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for key, field in section.model_fields.items():
        path = prefix + key
        nested = _section(field.annotation)
        named = _section(_value_type(field.annotation))
        if named is not None:
            yield path, "", field.description or ""
            yield from _reference(named, f"{path}.NAME.")
        elif nested is not None:
            yield path, "", field.description or ""
            yield from _reference(nested, f"{path}.")
        else:
            default = "required" if field.is_required() else f"`{_scalar(_plain(field.default))}`"
            yield path, default, field.description or ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
