"""Values from outside (YAML, or text from a flag) as the type that a dataclass field declares."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from looped.errors import LoopedError, shown, unknown

NONE_WORDS = ("none", "null")
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


def convert(value: Any, kind: Any, where: str, choices: Sequence[str] = ()) -> Any:
    """`value` as the type `kind`; text is read the way a person types it. Raises LoopedError that names `where`."""
    if get_origin(kind) in (Union, types.UnionType):
        return _convert_union(value, kind, where, choices)
    if get_origin(kind) is Literal:
        by_text = {str(choice): choice for choice in get_args(kind)}
        if str(value) not in by_text:
            raise unknown(where, str(value), by_text)
        return by_text[str(value)]
    if get_origin(kind) in (tuple, list):
        return _convert_sequence(value, kind, where, choices)
    if get_origin(kind) is dict:
        return _convert_mapping(value, kind, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        from looped.options import from_dict

        return from_dict(kind, value, where)
    reader = _READERS.get(kind)
    if reader is None:
        raise TypeError(f"{where}: fields of type {kind!r} cannot be set from a file or a flag")
    try:
        read = reader(value)
    except (ValueError, TypeError, OverflowError):
        raise LoopedError(f"{where} expects {describe(kind)}, got {shown(value)}") from None
    if choices and read not in choices:
        raise unknown(where, str(read), choices)
    return read


def describe(kind: Any) -> str:
    """The type in words, for messages: `a whole number or one of auto`. That None is allowed as well is not said."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(kind) if member is not types.NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) in (tuple, list):
        return f"a comma-separated list, each {describe(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a list of name=value, each value {describe(get_args(kind)[1])}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def without_none(kind: Any) -> Any:
    """`X` for `X | None`; every other type itself."""
    if get_origin(kind) in (Union, types.UnionType):
        members = [member for member in get_args(kind) if member is not types.NoneType]
        return members[0] if len(members) == 1 else kind
    return kind


def _convert_union(value: Any, kind: Any, where: str, choices: Sequence[str]) -> Any:
    members = get_args(kind)
    if types.NoneType in members and (value is None or value in NONE_WORDS):
        return None
    members = tuple(member for member in members if member is not types.NoneType)
    if len(members) == 1:
        return convert(value, members[0], where, choices)
    for member in members:
        try:
            return convert(value, member, where, choices)
        except LoopedError:
            continue
    raise LoopedError(f"{where} expects {describe(kind)}, got {shown(value)}")


def _convert_sequence(value: Any, kind: Any, where: str, choices: Sequence[str]) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise LoopedError(f"{where} expects {describe(kind)}, got {shown(value)}")
    members = get_args(kind)
    repeats = get_origin(kind) is list or members[-1] is Ellipsis
    if not repeats and len(value) != len(members):
        raise LoopedError(f"{where} expects {len(members)} values, got {len(value)}: {shown(value)}")
    kinds = [members[0]] * len(value) if repeats else list(members)
    items = [convert(item, item_kind, where, choices) for item, item_kind in zip(value, kinds, strict=True)]
    return items if get_origin(kind) is list else tuple(items)


def _convert_mapping(value: Any, kind: Any, where: str) -> dict[Any, Any]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",")]
        if all(equals for _, equals, _ in pairs):
            value = {name.strip(): text.strip() for name, _, text in pairs}
    if not isinstance(value, dict):
        raise LoopedError(f"{where} expects {describe(kind)}, got {shown(value)}")
    key_kind, item_kind = get_args(kind)
    places = {key: f"{where}: {key}" for key in value}
    return {convert(key, key_kind, places[key]): convert(item, item_kind, places[key]) for key, item in value.items()}


def _read_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    try:
        return int(value) if not isinstance(value, float) else _whole(value)
    except ValueError:
        return _whole(float(value))  # "1e9", which YAML too hands over as text


def _whole(value: float) -> int:
    if not value.is_integer():
        raise ValueError
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    if math.isnan(number):
        raise ValueError
    return number


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    raise ValueError


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _read_path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise TypeError
    return Path(value).expanduser()


def _read_none(value: Any) -> None:
    if value is not None:
        raise TypeError


_READERS: dict[Any, Callable[[Any], Any]] = {
    int: _read_int,
    float: _read_float,
    bool: _read_bool,
    str: _read_str,
    Path: _read_path,
    types.NoneType: _read_none,
}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    types.NoneType: "none",
}
