"""Work lists of the offline bench: prompts as token ids with a fixed number of tokens to generate for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from looped.analysis.lengths import draw, fits_of
from looped.analysis.workfiles import Row, read_rows
from looped.errors import LoopedError
from looped.files import find
from looped.model import LoopedLM
from looped.model.tokenizer import Tokenizer

DEFAULT_INPUT_LEN = 32
DEFAULT_OUTPUT_LEN = 32


@dataclass(frozen=True)
class WorkItem:
    """One request: its prompt and how many tokens it generates; `reference` is the answer that a data set gives."""

    prompt_ids: tuple[int, ...]
    output_len: int
    reference: tuple[int, ...] = ()


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

    From `prompts` if given: `alpaca`, `sharegpt`, `arxiv` (or several joined by `+`), whose lengths are drawn, or a
    file (repeated from its start when it is shorter). Else random token ids if
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
        fits = fits_of(str(prompts))
        if fits is not None:
            pairs, rng = itertools.islice(draw(fits, generator(seed)), num_requests), generator(seed + 1)
            items = (WorkItem(_random_ids(model, a, rng), output_len or b) for a, b in pairs)
            source = f"{prompts}: lengths from log-normal fits, seed {seed}"
        else:
            path = find(prompts, "work list")
            items, source = _from_file(path, model, num_requests, output_len, generator(seed)), path.name
    elif input_len is not None or model.tokenizer is None:
        length = input_len or DEFAULT_INPUT_LEN
        rng = generator(seed)
        drawn = (_random_ids(model, length, rng) for _ in range(num_requests))
        items = (WorkItem(ids, output_len or DEFAULT_OUTPUT_LEN) for ids in drawn)
        source = f"random token ids, {length} a prompt"
    else:
        items = _word_problems(model.tokenizer, num_requests, output_len, seed)
        source = "word problems" + ("" if output_len else ", outputs as long as their solutions")
    work = WorkList(tuple(items), source)
    _check(work, model)
    return work


def generator(seed: int) -> np.random.Generator:
    """Numbers of a seed of 64 bits, negative ones included, which numpy refuses as they are."""
    return np.random.default_rng(seed % (1 << 64))


def _random_ids(model: LoopedLM, length: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(rng.integers(0, model.config.vocab_size, length).tolist())


def _word_problems(tokenizer: Tokenizer, num_requests: int, output_len: int | None, seed: int) -> Iterator[WorkItem]:
    from looped.data.evalsets import eval_problems

    for problem in itertools.islice(eval_problems("trained", f"prompts/{seed}"), num_requests):
        prompt = problem.prompt()
        solution = problem.document().removeprefix(prompt)
        reference = tuple(tokenizer.encode(solution, add_special_tokens=False))
        yield WorkItem(tuple(tokenizer.encode(prompt)), output_len or len(reference), reference)


def _check(work: WorkList, model: LoopedLM) -> None:
    longest = max(len(item.prompt_ids) + item.output_len for item in work.items)
    if longest > model.config.max_positions:
        raise LoopedError(
            f"a request needs {longest} tokens, the context of {model.name} has {model.config.max_positions}; "
            "give a smaller --output-len or other prompts"
        )


def _length(row: Row) -> int:
    """Tokens of a request that has its answer with it."""
    return len(row.reference) + (row.prompt if isinstance(row.prompt, int) else len(row.prompt))


def _from_file(
    path: Path, model: LoopedLM, num_requests: int, output_len: int | None, rng: np.random.Generator
) -> list[WorkItem]:
    """The first requests of a file, without those of a data set that are too long; repeated from its start where it
    has fewer."""

    def encode(text: str, special: bool) -> list[int]:
        if model.tokenizer is None:
            raise LoopedError(f"{model.name} has no tokenizer: give `prompt_ids` or `prompt_len` in place of texts")
        return model.tokenizer.encode(text) if special else model.tokenizer.encode(text, add_special_tokens=False)

    room = model.config.max_positions
    fitting = (row for row in read_rows(path, encode) if not row.reference or _length(row) <= room)
    rows = list(itertools.islice(fitting, num_requests))
    if not rows:
        raise LoopedError(f"{path} holds no requests")
    items = []
    for row in itertools.islice(itertools.cycle(rows), num_requests):
        ids = _random_ids(model, row.prompt, rng) if isinstance(row.prompt, int) else row.prompt
        items.append(WorkItem(ids, output_len or row.output_len or DEFAULT_OUTPUT_LEN, row.reference))
    return items
