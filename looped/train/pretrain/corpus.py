"""The windows that a run trains on and is scored on: generated, or packed from texts, and kept in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from looped.data.build import MANIFEST, build_dataset
from looped.data.embedded import EMBEDDED
from looped.data.mixture import DataConfig
from looped.data.texts import TextConfig, Words, build_texts, find_words
from looped.errors import LoopedError
from looped.progress import progress
from looped.train.pretrain.recipe import Data
from looped.train.pretrain.windows import Windows

HELD_OUT_TOKENS = 1_000_000


class Corpus(NamedTuple):
    """What a run trains on and is scored on."""

    train: Windows
    held_out: Windows
    vocab_size: int
    eos_id: int
    pad_id: int | None
    tokenizer: Path


def open_corpus(data: Data, seed: int, device: torch.device, as_found: bool = False) -> Corpus:
    """The packed sets of `data.folder`, made there first where they are missing.

    Processes that share a folder may start together: one builds, the others wait. `as_found` takes sets that are there
    without comparing them with `data`: a resumed run goes on with what it began with, though a text has changed since.
    """
    if data.folder is None:
        raise LoopedError("data.folder is missing: give the folder of the packed windows, or an empty one to make them")
    words = find_words(data.tokenizer)
    data.folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(data.folder / "lock"):
        folders = [data.folder / "train", data.folder / "held-out"]
        if not as_found or not all((folder / MANIFEST).is_file() for folder in folders):
            folders = _generate(data) if data.source == (EMBEDDED,) else _pack(data, words)
    train, held_out = (Windows.read(folder, device, seed) for folder in folders)
    return Corpus(train, held_out, words.vocab_size, words.end, words.pad, words.folder)


def _generate(data: Data) -> list[Path]:
    """The windows of the package's own generators."""
    train = DataConfig(
        folder=str(data.folder and data.folder / "train"),
        tokens=data.tokens,
        seed=data.seed,
        workers=data.workers,
        seq_len=data.window,
        gsm8k=None if data.gsm8k is None else str(data.gsm8k),
        text=data.text,
        mix=data.mix,
    )
    assert data.folder is not None
    tokens = min(data.tokens, HELD_OUT_TOKENS)
    held_out = replace(train, folder=str(data.folder / "held-out"), tokens=tokens, text=(), split="eval")
    folders = []
    for config in (train, held_out):
        bar = progress(max(1, -(-config.tokens // (config.seq_len + 1))), f"data {Path(config.folder).name}")
        folders.append(build_dataset(config, lambda done, _, bar=bar: bar.advance(done - bar.done)))  # type: ignore[misc]
        if bar.done:
            bar.close()
    return folders


def _pack(data: Data, words: Words) -> list[Path]:
    """The windows of texts."""
    config = TextConfig(
        folder=str(data.folder),
        sources=data.source,
        tokens=data.tokens,
        held_out=data.held_out,
        seq_len=data.window,
        tokenizer=data.tokenizer,
        column=data.column,
    )
    width = data.window + 1
    bar = progress(-(-data.tokens // width) + -(-data.held_out // width), "data")
    folders = build_texts(config, words, bar.advance)
    if bar.done:
        bar.close()
    return folders


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
