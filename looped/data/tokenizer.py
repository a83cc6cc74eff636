"""The tokenizer both embedded models share: byte-level BPE, 2,048 tokens, digits always single, lossless."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from looped.data.drills import drill_problems
from looped.data.exemplars import prefix
from looped.data.wordmath.generate import word_problems
from looped.data.wordmath.words import Dice

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
PAD = "<|pad|>"
END_ID = 0
PAD_ID = 1
VOCAB_SIZE = 2048

# An operator between numbers is one piece with its spaces. A space before a digit stands alone, so a number is always
# the same digit tokens. A run of newlines is one piece, so a document splits alike alone and before another.
_PIECES = r" [-+*/=] (?=\p{N})|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %} {{ message['content'] | trim }}\n\n"
    "{% elif message['role'] == 'user' %}Q: {{ message['content'] | trim }}\nA:"
    "{% else %}{{ message['content'] | trim }}\n\n{% endif %}"
    "{% endfor %}"
)
"""Messages as questions and answers: the shape every training document has."""


def folder() -> Path:
    """Where the shipped tokenizer lies."""
    return Path(__file__).parent.parent / "assets" / "tokenizer"


@cache
def load(path: str | None = None) -> Tokenizer:
    """The fast tokenizer of a folder (default: the shipped one)."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str((Path(path) if path else folder()) / "tokenizer.json"))


def sample(extra: Iterable[str] = (), seed: int = 0, words: int = 30_000, drills: int = 10_000) -> Iterator[str]:
    """The fixed texts the tokenizer is trained on; `extra` adds the GSM8K documents."""
    dice = Dice(f"tokenizer/{seed}")
    for problem in itertools.islice(word_problems(dice), words):
        yield problem.document() + "\n\n"
    for problem in itertools.islice(drill_problems(dice), drills):
        yield problem.document() + "\n\n"
    for _ in range(50):
        yield prefix()
    yield from extra


def train(texts: Iterable[str]) -> Tokenizer:
    """BPE over the texts with the complete byte alphabet, so that any text round-trips."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, what `AutoTokenizer.from_pretrained(path)` needs offline."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1536,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
