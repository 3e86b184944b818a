"""Values read from small files (TOML or JSON), with one sentence for what is wrong in them."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron_elas.spec.errors import BadUsage

_PACKAGE = Path(__file__).resolve().parents[1]


def configs_folder() -> Path:
    """Where the profiles are that come with the project: inside a wheel, else in the checkout."""
    inside = _PACKAGE / "_data" / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def find_table(folder: str, name: str) -> Path:
    """The file of a profile.

    Args:
        folder: Of ``configs/``: devices, clusters or jobs.
        name: Of a profile there, such as ``npu-96``; or the path of a file of the user's, ending in .toml or .json.

    Raises:
        BadUsage: There is none.
    """
    if name.endswith((".toml", ".json")):
        return Path(name)
    path = configs_folder() / folder / f"{name}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.toml"))
        raise BadUsage(f"there is no {name!r} in configs/{folder}: name one of {', '.join(known)}, or a .toml file")
    return path


def read_table(path: Path) -> dict[str, Any]:
    """The content of a TOML or JSON file. Raises BadUsage when it cannot be read."""
    try:
        text = path.read_text()
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise BadUsage(f"{path} cannot be read ({error.strerror}): name another file") from error
    except ValueError as error:
        raise BadUsage(f"{path} is no valid {path.suffix[1:].upper()} ({error}): correct it there") from error
    if not isinstance(table, dict):
        raise BadUsage(f"{path} holds a {type(table).__name__} where names and values are wanted")
    return table


def build[Value](kind: type[Value], table: Mapping[str, Any], where: str) -> Value:
    """A frozen dataclass from a table with its fields' names.

    Args:
        kind: The dataclass. Fields may be numbers, words, tuples, other such dataclasses, or one of these or None.
        table: Values by field; fields with a default may be left out.
        where: What the sentence of an error begins with: the file, perhaps with a part of it.

    Raises:
        BadUsage: A field is missing, unknown, of another type, or refused by the dataclass itself.
    """
    assert dataclasses.is_dataclass(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if strange := sorted(set(table) - set(fields)):
        raise BadUsage(f"{where}: {strange[0]!r} is not known: it has {', '.join(fields)}")
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in table]:
        raise BadUsage(f"{where}: {missing[0]!r} is missing: add it")
    hints = _hints(kind)
    values = {name: _convert(hints[name], value, f"{where}: {name}") for name, value in table.items()}
    try:
        return kind(**values)
    except BadUsage as error:
        raise BadUsage(f"{where}: {error}") from error


def read_lines[Value](kind: type[Value], path: Path) -> tuple[Value, ...]:
    """The values of a file with one JSON object per line. Raises BadUsage.

    A last line without an end is left out unless it is whole: somebody may be writing it.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise BadUsage(f"{path} cannot be read ({error.strerror}): name another file") from error
    values = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            table = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise BadUsage(f"{where} is no valid JSON ({error}): correct or remove it") from error
        if not isinstance(table, dict):
            raise BadUsage(f"{where} is no object: correct or remove it")
        values.append(build(kind, table, where))
    return tuple(values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Worked out once: files of many lines ask for each of them."""
    return get_type_hints(kind)


def as_table(value: Any) -> dict[str, Any]:
    """What ``build`` makes the value from again, ready for ``json.dumps``."""
    return dataclasses.asdict(value)


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (part for part in get_args(kind) if part is not type(None))
        return _convert(kind, value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise BadUsage(f"{where} is {value!r}: write a table")
        return build(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise BadUsage(f"{where} is {value!r}: write a list")
        return tuple(_convert(get_args(kind)[0], part, f"{where}[{i}]") for i, part in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadUsage(f"{where} is {value!r}: write a {_WORDS[kind]}")
    return value


_WORDS = {int: "whole number", float: "number", str: "word", bool: "true or false"}
