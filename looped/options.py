"""One configuration mechanism for commands and recipes: frozen dataclasses filled from a YAML file and from flags.

A verb declares what it takes as a dataclass, one field per flag:

    @dataclass(frozen=True)
    class Options:
        '''Score a model on a task.'''
        task: str = argument("the task to run")
        kv: Literal["depth", "ragged"] | None = option(None, "KV layout; the model's own when left out")
        num_fewshot: int = option(0, "exemplars before each question")
        optim: Optim = Optim()

`parse(Options, argv, prog)` then accepts `TASK --kv ragged --num-fewshot 5 --optim.lr 1e-3 --config recipe.yaml`.
Keys in the file are the field names, nested dataclasses are nested mappings. Flags win over the file, the file over
the defaults. Every mistake of the user's is a LoopedError: one sentence that names the flag or the key.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from looped.convert import convert, describe, without_none
from looped.errors import LoopedError, shown, unknown
from looped.files import find

T = TypeVar("T")


class HelpRequested(Exception):
    """Raised by `parse` for -h and --help; str() of it is the help text."""


def option(default: T, doc: str, *, choices: Sequence[str] = ()) -> T:
    """A dataclass field that is a flag. `choices` limits a text field to names that only the program knows."""
    metadata = {"doc": doc, "choices": tuple(choices), "positional": False}
    if isinstance(default, dict | list):
        return cast(T, dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def argument(doc: str, *, default: Any = dataclasses.MISSING, choices: Sequence[str] = ()) -> Any:
    """A positional argument; required unless it has a default. One of a tuple type takes all words that remain."""
    metadata = {"doc": doc, "choices": tuple(choices), "positional": True}
    return dataclasses.field(default=default, metadata=metadata)


class Leaf(NamedTuple):
    """One value that can be set: its dotted path of field names, and what its field says of it."""

    path: str
    kind: Any
    default: Any
    doc: str
    choices: tuple[str, ...]
    positional: bool

    @property
    def flag(self) -> str:
        return "--" + self.path.replace("_", "-")

    @property
    def typed(self) -> str:
        """The leaf as it stands on a command line."""
        return self.path.upper() if self.positional else self.flag

    @property
    def is_switch(self) -> bool:
        return without_none(self.kind) is bool and not self.positional


def parse(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """An instance of `cls` from command-line words. Raises LoopedError, and HelpRequested for -h and --help."""
    leaves = list(_leaves(cls))
    if _asks_for_help(argv):
        raise HelpRequested(_help(cls, leaves, prog))
    given = _read_words(leaves, argv, prog)
    config = given.pop("config", None)
    tree = read_yaml(config) if config is not None else {}
    return _fill(cls, leaves, tree, given, source=str(config), prog=prog)


def from_dict(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    """An instance of `cls` from a mapping of field names; errors begin with `source`."""
    return _fill(cls, list(_leaves(cls)), values, {}, source=source, prog="")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file: a path from the working directory, or of a recipe that ships with the package."""
    import yaml

    try:
        tree = yaml.safe_load(find(path, "configuration file").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LoopedError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is not None and not isinstance(tree, dict):
        raise LoopedError(f"{path} must hold a mapping of option names to values, but holds {shown(tree)}")
    return {str(key): value for key, value in (tree or {}).items()}


def _asks_for_help(argv: Sequence[str]) -> bool:
    words = argv[: argv.index("--")] if "--" in argv else argv
    return "-h" in words or "--help" in words


def _section(kind: Any) -> type[Any] | None:
    """The dataclass that a field nests, if it nests one."""
    inner = without_none(kind)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def _default(field: dataclasses.Field[Any], base: Any) -> Any:
    if base is not None:
        return getattr(base, field.name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _fields(cls: Any, base: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, Any]]:
    """(field, type, default) of a dataclass; `base` is the instance whose values are the defaults, if there is one."""
    kinds = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field, kinds[field.name], _default(field, base)


def _instance(default: Any) -> Any:
    return default if dataclasses.is_dataclass(default) else None


def _leaves(cls: Any, prefix: str = "", base: Any = None) -> Iterator[Leaf]:
    """All values of `cls` in order, nested ones under dotted paths."""
    for field, kind, default in _fields(cls, base):
        section = _section(kind)
        if section is not None:
            yield from _leaves(section, f"{prefix}{field.name}.", _instance(default))
            continue
        positional = bool(field.metadata.get("positional")) and not prefix
        doc, choices = field.metadata.get("doc", ""), field.metadata.get("choices", ())
        yield Leaf(prefix + field.name, kind, default, doc, choices, positional)


def _read_words(leaves: Sequence[Leaf], argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Path → what was typed: text, True or False for a switch, a list where a positional takes all that remain."""
    by_flag = {leaf.flag: leaf for leaf in leaves if not leaf.positional}
    by_flag["--config"] = Leaf("config", Path, None, "", (), False)
    off = {"--no-" + leaf.flag[2:]: leaf for leaf in leaves if leaf.is_switch}
    given: dict[str, Any] = {}
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        flag, equals, value = word.partition("=")
        if word == "--":
            words.extend(rest)
        elif not word.startswith("-") or word == "-":
            words.append(word)
        elif flag in off and not equals:
            given[off[flag].path] = False
        elif flag not in by_flag:
            near = difflib.get_close_matches(flag, [*by_flag, *off], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise LoopedError(f"unknown flag {flag}; {hint}see {prog} --help")
        elif equals:
            given[by_flag[flag].path] = value
        elif by_flag[flag].is_switch:
            given[by_flag[flag].path] = True
        else:
            value = next(rest, "--")
            if value.startswith("--"):
                raise LoopedError(f"{flag} needs a value: {describe(by_flag[flag].kind)}")
            given[by_flag[flag].path] = value
    return given | _place_positionals(leaves, words, prog)


def _place_positionals(leaves: Sequence[Leaf], words: list[str], prog: str) -> dict[str, Any]:
    placed: dict[str, Any] = {}
    for leaf in (leaf for leaf in leaves if leaf.positional):
        if words and get_origin(without_none(leaf.kind)) is tuple:
            placed[leaf.path], words = words, []
        elif words:
            placed[leaf.path], *words = words
    if words:
        raise LoopedError(f"unexpected argument {words[0]!r}; see {prog} --help")
    return placed


def _fill(
    cls: type[T], leaves: Sequence[Leaf], tree: Mapping[str, Any], given: Mapping[str, Any], *, source: str, prog: str
) -> T:
    """An instance of `cls`: what was `given` on the line, else what the file's `tree` says, else the defaults."""
    from_file = dict(_flatten(cls, tree, source))
    values: dict[str, Any] = {path: None for path, value in from_file.items() if value is None}
    for leaf in leaves:
        if leaf.path in given:
            values[leaf.path] = convert(given[leaf.path], leaf.kind, leaf.typed, leaf.choices)
        elif leaf.path in from_file:
            values[leaf.path] = convert(from_file[leaf.path], leaf.kind, f"{source}: {leaf.path}", leaf.choices)
        elif leaf.positional and leaf.default is dataclasses.MISSING:
            raise LoopedError(f"{leaf.typed} is missing ({leaf.doc}); see {prog} --help")
    return cast(T, _assemble(cls, values, prefix="", base=None, source=source))


def _flatten(cls: Any, tree: Mapping[str, Any], source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The file's values under dotted paths; a nested mapping that is null yields its own path."""
    sections = {field.name: (_section(kind), kind) for field, kind, _ in _fields(cls, None)}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in sections:
            raise LoopedError(f"{source}: {unknown('key', path, [prefix + name for name in sections])}")
        section, kind = sections[key]
        if section is None:
            yield path, value
        elif isinstance(value, dict):
            yield from _flatten(section, value, source, path + ".")
        elif value is None and kind is not section:
            yield path, None
        else:
            raise LoopedError(f"{source}: {path} expects a mapping of option names to values, got {shown(value)}")


def _assemble(cls: Any, values: Mapping[str, Any], *, prefix: str, base: Any, source: str) -> Any:
    """`base`, or a new `cls`, with `values` (by dotted path) in place of the defaults."""
    own: dict[str, Any] = {}
    for field, kind, default in _fields(cls, base):
        path, section = prefix + field.name, _section(kind)
        if section is not None and any(name.startswith(path + ".") for name in values):
            own[field.name] = _assemble(section, values, prefix=path + ".", base=_instance(default), source=source)
        elif path in values:
            own[field.name] = values[path]
        elif default is dataclasses.MISSING:
            raise LoopedError(f"{source}: {path} is missing ({field.metadata.get('doc', 'it has no default')})")
    return dataclasses.replace(base, **own) if base is not None else cls(**own)


def _help(cls: type[Any], leaves: Sequence[Leaf], prog: str) -> str:
    """Usage, the class docstring, then one entry per value with its doc and default."""
    positionals = [leaf for leaf in leaves if leaf.positional]
    places = [leaf.typed if leaf.default is dataclasses.MISSING else f"[{leaf.typed}]" for leaf in positionals]
    usage = " ".join(["usage:", prog, *places, "[flags]"])
    parts = [usage, inspect.cleandoc(cls.__doc__ or "")]
    parts += [_entry(_head(leaf), leaf) for leaf in positionals]
    parts += [_entry(_head(leaf), leaf) for leaf in leaves if not leaf.positional]
    parts.append(_wrapped("--config PATH", "YAML file with values for these names; flags win over it"))
    blocks = [part for part in parts if part]
    return "\n\n".join(blocks[:2]) + "\n\n" + "\n".join(blocks[2:])


def _entry(head: str, leaf: Leaf) -> str:
    hidden = leaf.default in (dataclasses.MISSING, None, "", (), [])
    default = "" if hidden else f" (default: {_default_text(leaf.default)})"
    return _wrapped(head, leaf.doc + default)


def _default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in value)
    return str(value)


def _head(leaf: Leaf) -> str:
    """The value as it is typed: `--[no-]graphs`, `--kv {depth,ragged}`, `--limit N`, `TASK`."""
    kind = without_none(leaf.kind)
    choices = leaf.choices or (get_args(kind) if get_origin(kind) is Literal else ())
    if leaf.is_switch:
        return f"--[no-]{leaf.flag[2:]}"
    if choices:
        return leaf.typed + " {" + ",".join(str(choice) for choice in choices) + "}"
    if leaf.positional:
        return leaf.typed
    return leaf.typed + " " + {int: "N", float: "X", Path: "PATH", str: "TEXT"}.get(kind, "VALUE")


def _wrapped(head: str, text: str) -> str:
    indent, width = " " * 26, 100
    first = f"  {head}"
    if len(first) <= len(indent) - 2:
        return textwrap.fill(text, width, initial_indent=first.ljust(len(indent)), subsequent_indent=indent)
    return first + "\n" + textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
