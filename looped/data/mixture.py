"""The training mixture: which documents, in which proportion, in which order. Deterministic by (seed, shard)."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from looped.data.drills import drill_problems
from looped.data.gsm8k import gsm8k_train
from looped.data.long_drills import long_problems
from looped.data.wordmath.generate import word_problems
from looped.data.wordmath.problem import held_out
from looped.data.wordmath.words import Dice
from looped.errors import LoopedError
from looped.options import option

WORDS, DRILLS, GSM8K, TEXT, LONG = "words", "drills", "gsm8k", "text", "long"
SOURCES = (WORDS, DRILLS, GSM8K, TEXT, LONG)
GENERATED = frozenset({WORDS, DRILLS, LONG})
REPOSITORY = "repository"
TEXT_PIECE = 1500
"""Characters of one plain-text document, cut at paragraph ends."""


@dataclass(frozen=True)
class Mix:
    """Share of the tokens by source. A source without data (no path given) leaves its share to the word problems."""

    words: float = option(0.68, "share of word problems with a written chain")
    drills: float = option(0.22, "share of arithmetic drills, half of them answered directly")
    gsm8k: float = option(0.06, "share of GSM8K train")
    text: float = option(0.04, "share of plain text")
    long: float = option(0.0, "share of drills with many dependent steps, answered directly")


@dataclass(frozen=True)
class DataConfig:
    """What `build_dataset` builds. `tokens` is rounded up to whole windows of seq_len + 1."""

    folder: str
    tokens: int = 300_000_000
    seed: int = 0
    workers: int = 0
    """Processes; 0 takes every core."""
    seq_len: int = 1536
    exemplar_share: float = 0.25
    """Share of the windows that begin with the public exemplars."""
    mix: Mix = field(default_factory=Mix)
    gsm8k: str | None = None
    """JSONL of the training problems, or `openai/gsm8k`; None leaves GSM8K out."""
    text: tuple[str, ...] = ()
    """Plain-text files; `repository` means the README, the docs and the sources of this package (data excepted)."""
    split: Literal["train", "eval"] = "train"
    """`eval` packs only items whose hash is held out: for a validation loss."""
    tokenizer: str | None = None


class Doc(NamedTuple):
    """A document without its terminator. `answer_digits`: length of the final answer (0: plain text)."""

    text: str
    source: str
    answer_digits: int
    direct: bool


class Sources(NamedTuple):
    """Documents that come from files, read once and handed to every worker."""

    gsm8k: tuple[tuple[str, int], ...]
    text: tuple[str, ...]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]


def read_sources(config: DataConfig) -> Sources:
    """Reads the files of a config. Raises LoopedError for a missing file or column."""
    problems = gsm8k_train(config.gsm8k) if config.gsm8k else []
    evaluation = config.split == "eval"
    kept = [
        (p.document(), len(p.answer)) for p in problems if held_out(p.question) == evaluation and p.answer.isdigit()
    ]
    pieces = [] if evaluation else [piece for path in _text_paths(config.text) for piece in _pieces(path)]
    return Sources(tuple(kept), tuple(pieces))


def _text_paths(names: tuple[str, ...]) -> list[Path]:
    paths: list[Path] = []
    for name in names:
        if name == REPOSITORY:
            package = Path(__file__).parent.parent
            root = package.parent
            paths += [p for p in (root / "README.md", root / "LICENSE") if p.is_file()]
            paths += sorted((root / "docs").glob("*.md"))
            # not the data package: it holds the wording of the held-out templates
            paths += [p for p in sorted(package.rglob("*.py")) if p.parts[len(package.parts)] != "data"]
        elif Path(name).is_file():
            paths.append(Path(name))
        else:
            raise LoopedError(f"there is no text file {name}; give paths of text files or {REPOSITORY!r}.")
    return paths


def _pieces(path: Path) -> Iterator[str]:
    piece = ""
    for paragraph in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(piece) >= TEXT_PIECE:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def streams(config: DataConfig, sources: Sources, dice: Dice) -> dict[str, Iterator[Doc]]:
    """An endless stream of documents for every source that has a share and data."""
    evaluation = config.split == "eval"
    result: dict[str, Iterator[Doc]] = {}
    if config.mix.words > 0:
        result[WORDS] = (Doc(p.document(), WORDS, len(str(p.answer)), False) for p in word_problems(dice, evaluation))
    if config.mix.drills > 0:
        result[DRILLS] = (
            Doc(p.document(), DRILLS, len(str(p.answer)), not p.chain) for p in drill_problems(dice, evaluation)
        )
    if config.mix.long > 0:
        result[LONG] = (Doc(p.document(), LONG, len(str(p.answer)), True) for p in long_problems(dice, evaluation))
    if config.mix.gsm8k > 0 and sources.gsm8k:
        result[GSM8K] = (Doc(*_shown(dice.choice(sources.gsm8k))) for _ in itertools.count())
    if config.mix.text > 0 and sources.text:
        result[TEXT] = (Doc(dice.choice(sources.text), TEXT, 0, False) for _ in itertools.count())
    return result


def _shown(item: tuple[str, int]) -> tuple[str, str, int, bool]:
    return item[0], GSM8K, item[1], False


def shares(config: DataConfig, present: list[str]) -> dict[str, float]:
    """Token shares of the sources present, the missing ones given to the word problems, summing to 1."""
    wanted = asdict(config.mix)
    missing = sum(wanted[name] for name in SOURCES if name not in present)
    result = {name: wanted[name] + (missing if name == WORDS else 0.0) for name in present}
    total = sum(result.values())
    if total <= 0:
        raise LoopedError("the mix has no source with a positive share and data; give words or drills a share.")
    return {name: share / total for name, share in result.items()}


def mixed(config: DataConfig, sources: Sources, mean_tokens: dict[str, float], shard: int) -> Iterator[Doc]:
    """The endless document stream of a shard. A source is drawn in proportion to token share over mean length."""
    dice = Dice(f"{config.split}/{config.seed}/{shard}")
    by_source = streams(config, sources, dice)
    names = list(by_source)
    share = shares(config, names)
    weights = list(itertools.accumulate(share[name] / mean_tokens[name] for name in names))
    choices = dice.random.choices
    while True:
        for name in choices(names, cum_weights=weights, k=256):
            yield next(by_source[name])
