"""Work lists of the offline bench: prompts as token ids with a fixed number of tokens to generate for each."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from looped.errors import LoopedError
from looped.files import find
from looped.model import LoopedLM
from looped.model.tokenizer import Tokenizer

DEFAULT_INPUT_LEN = 32
DEFAULT_OUTPUT_LEN = 32


@dataclass(frozen=True)
class WorkItem:
    """One request: its prompt and how many tokens it generates."""

    prompt_ids: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class WorkList:
    """Requests in their order, and in words where they come from."""

    items: tuple[WorkItem, ...]
    source: str

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt_ids) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)


def build(
    model: LoopedLM,
    num_requests: int,
    prompts: Path | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    seed: int = 0,
) -> WorkList:
    """`num_requests` requests for a model.

    From a file of prompts if one is given (repeated from its start when it is shorter), else random token ids if
    `input_len` is given or the model has no tokenizer, else word problems with outputs as long as their solutions.
    `output_len` overrides these lengths.
    Raises `LoopedError` for a damaged file and for requests that do not fit the model's context.
    """
    if num_requests < 1:
        raise LoopedError(f"--num-requests must be at least 1, got {num_requests}")
    for flag, value in (("--input-len", input_len), ("--output-len", output_len)):
        if value is not None and value < 1:
            raise LoopedError(f"{flag} must be at least 1, got {value}")
    items: Iterable[WorkItem]
    if prompts is not None:
        if input_len is not None:
            raise LoopedError("--prompts gives the prompts, --input-len makes random ones: give one of the two")
        path = find(prompts, "work list")
        rows = list(_read(path, model, output_len, _generator(seed)))
        if not rows:
            raise LoopedError(f"{path} holds no requests")
        items, source = itertools.islice(itertools.cycle(rows), num_requests), path.name
    elif input_len is not None or model.tokenizer is None:
        length = input_len or DEFAULT_INPUT_LEN
        rng = _generator(seed)
        drawn = (_random_ids(model, length, rng) for _ in range(num_requests))
        items = (WorkItem(ids, output_len or DEFAULT_OUTPUT_LEN) for ids in drawn)
        source = f"random token ids, {length} a prompt"
    else:
        items = _word_problems(model.tokenizer, num_requests, output_len, seed)
        source = "word problems" + ("" if output_len else ", outputs as long as their solutions")
    work = WorkList(tuple(items), source)
    _check(work, model)
    return work


def _generator(seed: int) -> np.random.Generator:
    """Numbers of a seed of 64 bits, negative ones included, which numpy refuses as they are."""
    return np.random.default_rng(seed % (1 << 64))


def _random_ids(model: LoopedLM, length: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.integers(0, model.config.vocab_size, length))


def _word_problems(tokenizer: Tokenizer, num_requests: int, output_len: int | None, seed: int) -> Iterator[WorkItem]:
    from looped.data.evalsets import eval_problems

    for problem in itertools.islice(eval_problems("trained", f"prompts/{seed}"), num_requests):
        prompt = problem.prompt()
        solution = problem.document().removeprefix(prompt)
        length = output_len or len(tokenizer.encode(solution, add_special_tokens=False))
        yield WorkItem(tuple(tokenizer.encode(prompt)), length)


def _check(work: WorkList, model: LoopedLM) -> None:
    longest = max(len(item.prompt_ids) + item.output_len for item in work.items)
    if longest > model.config.max_positions:
        raise LoopedError(
            f"a request needs {longest} tokens, the context of {model.name} has {model.config.max_positions}; "
            "give a smaller --output-len or other prompts"
        )


def _read(path: Path, model: LoopedLM, output_len: int | None, rng: np.random.Generator) -> Iterator[WorkItem]:
    """Rows of a JSONL file (`prompt` or `prompt_ids`, and `output_len`), or of a JSON object with length `pairs`."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            for pair in _pairs(json.loads(text), path):
                yield WorkItem(_random_ids(model, pair[0], rng), output_len or pair[1])
            return
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise LoopedError(f"{path} is not valid JSON ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield _item(row, f"{path}, row {number}", model, output_len)


def _pairs(content: Any, path: Path) -> list[list[int]]:
    pairs = content.get("pairs") if isinstance(content, dict) else None
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair) for pair in pairs
    ):
        raise LoopedError(f'{path} must hold {{"pairs": [[prompt tokens, output tokens], ...]}}')
    return pairs


def _item(row: Any, where: str, model: LoopedLM, output_len: int | None) -> WorkItem:
    if not isinstance(row, dict) or ("prompt" in row) == ("prompt_ids" in row):
        raise LoopedError(f"{where}: give a column `prompt` (text) or `prompt_ids` (token ids)")
    length = output_len if output_len is not None else row.get("output_len", DEFAULT_OUTPUT_LEN)
    if not isinstance(length, int) or length < 1:
        raise LoopedError(f"{where}: `output_len` must be a whole number of at least 1, got {length!r}")
    if "prompt_ids" in row:
        ids = row["prompt_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise LoopedError(f"{where}: `prompt_ids` must be a list of token ids")
    elif not isinstance(row["prompt"], str):
        raise LoopedError(f"{where}: `prompt` must be text")
    elif model.tokenizer is None:
        raise LoopedError(f"{model.name} has no tokenizer: give `prompt_ids` in place of `prompt`")
    else:
        ids = model.tokenizer.encode(row["prompt"])
    return WorkItem(tuple(ids), length)


def parse_depths(text: str, max_loops: int) -> dict[int, float]:
    """A distribution over exit depths: `uniform`, or depth:share pairs such as `2:0.5,3:0.3,4:0.2`.

    Raises `LoopedError` for a depth outside 1..R, a negative share, or shares that do not sum to 1.
    """
    if text.strip() == "uniform":
        return {depth: 1 / max_loops for depth in range(1, max_loops + 1)}
    shares: dict[int, float] = {}
    for part in text.split(","):
        depth, _, share = part.partition(":")
        try:
            shares[int(depth)] = float(share)
        except ValueError:
            raise LoopedError(
                f"--replay-depths takes `uniform` or pairs such as 2:0.5,3:0.3,4:0.2, got {text!r}"
            ) from None
    if not all(1 <= depth <= max_loops for depth in shares):
        raise LoopedError(f"--replay-depths {text}: depths must be between 1 and {max_loops}")
    if min(shares.values()) < 0 or not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise LoopedError(f"--replay-depths {text}: shares must be at least 0 and sum to 1")
    return shares


def draw_depths(work: WorkList, shares: dict[int, float], seed: int) -> list[list[int]]:
    """One exit depth for every token of every request, independent draws; entry 0, the prefill's, is not used."""
    rng = _generator(seed)
    depths, p = np.array(list(shares)), np.array(list(shares.values()))
    return [rng.choice(depths, item.output_len, p=p / p.sum()).tolist() for item in work.items]
