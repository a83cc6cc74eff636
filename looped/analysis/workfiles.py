"""Work lists in files: lengths, prompts, data sets of instructions and of conversations, and the Azure trace.

A row says what it is by its columns; see eval/workloads/README.md.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from looped.analysis.lengths import MIN_TOKENS
from looped.errors import LoopedError

PROMPT_LENS = ("prompt_len", "input_len", "prompt_tokens", "ContextTokens")
OUTPUT_LENS = ("output_len", "output_tokens", "GeneratedTokens")
_ASKERS, _ANSWERERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


class Row(NamedTuple):
    """One request: its prompt, as tokens or as a length, how much it generates, and the reference answer if known."""

    prompt: tuple[int, ...] | int
    output_len: int | None
    reference: tuple[int, ...] = ()


Encode = Callable[[str, bool], list[int]]
"""Text to token ids; the flag asks for the special tokens that begin a prompt."""


def read_rows(path: Path, encode: Encode) -> Iterator[Row]:
    """The requests of a .json, .jsonl or .csv file. Raises `LoopedError` for a damaged file or row."""
    for number, value in enumerate(_values(path), start=1):
        row = _row(value, f"{path}, row {number}", encode)
        if row is not None:
            yield row


def _values(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                yield from csv.DictReader(file)
            elif path.suffix == ".jsonl":
                yield from (json.loads(line) for line in file if line.strip())
            else:
                yield from _listed(json.load(file), path)
    except (ValueError, csv.Error) as error:
        kind = "CSV" if path.suffix == ".csv" else "JSON"
        raise LoopedError(f"{path} is not valid {kind} ({error})") from error


def _listed(content: Any, path: Path) -> list[Any]:
    if isinstance(content, list):
        return content
    pairs = content.get("pairs") if isinstance(content, dict) else None
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair) for pair in pairs
    ):
        raise LoopedError(f'{path} must hold {{"pairs": [[prompt tokens, output tokens], ...]}} or a list of requests')
    return [{"prompt_len": prompt, "output_len": output} for prompt, output in pairs]


def _row(row: Any, where: str, encode: Encode) -> Row | None:
    """What a row says; None for one that a data set's users leave out (too short, not a question and an answer)."""
    if not isinstance(row, Mapping):
        raise LoopedError(f"{where}: must be an object with the columns of a request")
    if "conversations" in row or "conversation" in row:
        return _pair(*_first_pair(row.get("conversations") or row.get("conversation")), encode)
    if "instruction" in row:
        extra = row.get("input") or ""
        return _pair(f"{row['instruction']}\n{extra}" if extra else str(row["instruction"]), row.get("output"), encode)
    name = next((name for name in PROMPT_LENS if name in row), None)
    if name is not None:
        return Row(_count(row, name, where), _output_len(row, where))
    return _prompt(row, where, encode)


def _prompt(row: Mapping[str, Any], where: str, encode: Encode) -> Row:
    """A row with `prompt` or `prompt_ids`, and where it has them `output` or `output_ids`."""
    if ("prompt" in row) == ("prompt_ids" in row):
        raise LoopedError(f"{where}: give a column `prompt` (text) or `prompt_ids` (token ids)")
    output_len = _output_len(row, where)
    if "prompt_ids" in row:
        ids = _ids(row, "prompt_ids", where)
    elif not isinstance(row["prompt"], str):
        raise LoopedError(f"{where}: `prompt` must be text")
    else:
        ids = tuple(encode(row["prompt"], True))
    reference: tuple[int, ...] = ()
    if "output_ids" in row:
        reference = _ids(row, "output_ids", where)
    elif isinstance(row.get("output"), str):
        reference = tuple(encode(row["output"], False))
    return Row(ids, output_len or len(reference) or None, reference)


def _first_pair(turns: Any) -> tuple[Any, Any]:
    """The first question of a conversation and its answer; (None, None) where it begins otherwise."""
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, Mapping) for turn in turns[:2]):
        return None, None
    (asker, question), (answerer, answer) = (
        (turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))) for turn in turns[:2]
    )
    return (question, answer) if asker in _ASKERS and answerer in _ANSWERERS else (None, None)


def _pair(question: Any, answer: Any, encode: Encode) -> Row | None:
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    prompt, reference = tuple(encode(question, True)), tuple(encode(answer, False))
    if min(len(prompt), len(reference)) < MIN_TOKENS:
        return None
    return Row(prompt, len(reference), reference)


def _ids(row: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    ids = row[name]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise LoopedError(f"{where}: `{name}` must be a list of token ids")
    return tuple(ids)


def _output_len(row: Mapping[str, Any], where: str) -> int | None:
    name = next((name for name in OUTPUT_LENS if name in row), None)
    return None if name is None else _count(row, name, where)


def _count(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row[name]
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if type(value) is not int or value < 1:
        raise LoopedError(f"{where}: `{name}` must be a whole number of at least 1, got {value!r}")
    return value
