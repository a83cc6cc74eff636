"""Packs documents of any source and any tokenizer into windows on disk, for runs that outgrow memory.

Documents follow each other, each with the end-of-text token behind it, and are cut into windows of seq_len + 1 tokens
wherever a window is full. The first documents are held out, the rest is trained on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from looped.data import tokenizer as shipped
from looped.data.build import MANIFEST
from looped.data.embedded import EMBEDDED
from looped.data.rows import find_files
from looped.data.sources import read_texts
from looped.errors import LoopedError
from looped.files import read_object, write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = 256
_HEADER = 128


@dataclass(frozen=True)
class TextConfig:
    """What `build_texts` builds: `tokens` for training at most, and `held_out` before them."""

    folder: str
    sources: tuple[str, ...]
    tokens: int
    held_out: int
    seq_len: int
    tokenizer: str = EMBEDDED
    column: str = "text"


class Words(NamedTuple):
    """A tokenizer, the folder of its files, and the ids that training needs."""

    tokenizer: Tokenizer
    folder: Path
    vocab_size: int
    end: int
    pad: int | None


def find_words(name: str) -> Words:
    """The tokenizer of a folder or a hub repository, or the shipped one by the name `embedded`.

    Raises LoopedError where it is missing or names no end-of-text token.
    """
    from tokenizers import Tokenizer

    folder = shipped.folder() if name == EMBEDDED else _tokenizer_folder(name)
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise LoopedError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    config = folder / "tokenizer_config.json"
    settings = read_object(config) if config.is_file() else {}
    end = _special(tokenizer, settings.get("eos_token"))
    if end is None:
        raise LoopedError(f"the tokenizer {name} names no end-of-text token (eos_token in its tokenizer_config.json)")
    return Words(tokenizer, folder, tokenizer.get_vocab_size(), end, _special(tokenizer, settings.get("pad_token")))


def _special(tokenizer: Tokenizer, token: object) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return found


def _tokenizer_folder(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise LoopedError(f"{path} holds no tokenizer.json")
        return path
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LoopedError(f"there is no tokenizer folder {name}; give one, a hub name, or {EMBEDDED!r}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["tokenizer*.json", "special_tokens_map.json", "*.jinja"]))
    except Exception as error:  # offline, unknown id, no access: the hub's many exception types mean one thing here
        raise LoopedError(
            f"the tokenizer {name} is not in the local cache and the hub could not be reached "
            f"({type(error).__name__}); download it elsewhere and give its folder"
        ) from error


def build_texts(config: TextConfig, words: Words, advance: Callable[[int], None] | None = None) -> list[Path]:
    """The folders of the windows to train on and of those held out, filled unless they hold the same already.

    `advance` is told the windows written. Raises LoopedError where the folder holds something else, a source is
    missing, or the documents do not fill a window of each.
    """
    root = Path(config.folder)
    folders = [root / "train", root / "held-out"]
    identity = _identity(config, words)
    if all((folder / MANIFEST).is_file() for folder in folders):
        if all(read_object(folder / MANIFEST).get("identity") == identity for folder in folders):
            return folders
        raise LoopedError(f"{root} holds another packed data set; give another folder or remove it.")
    kind = np.dtype("<u2") if words.vocab_size <= 1 << 16 else np.dtype("<u4")
    width = config.seq_len + 1
    limits = [-(-config.tokens // width), -(-config.held_out // width)]
    writers = [_Writer(folder, width, kind, limit) for folder, limit in zip(folders, limits, strict=True)]
    documents = itertools.chain.from_iterable(read_texts(source, config.column) for source in config.sources)
    for ids in _encoded(documents, words):
        writer = writers[0] if writers[1].full else writers[1]
        written = writer.add(ids)
        if advance and written:
            advance(written)
        if writers[0].full:
            break
    for writer in reversed(writers):
        writer.close(identity, config)
    return folders


def _encoded(documents: Iterator[str], words: Words) -> Iterator[NDArray[np.int64]]:
    while batch := list(itertools.islice(documents, _BATCH)):
        for encoding in words.tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.asarray([*encoding.ids, words.end], dtype=np.int64)


class _Writer:
    """Appends whole windows to `tokens.npy`; the header, which says how many, is written at the end."""

    def __init__(self, folder: Path, width: int, kind: np.dtype[np.unsignedinteger], limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        self.folder, self.width, self.kind, self.limit = folder, width, kind, limit
        self.rows = 0
        self._left = np.empty(0, kind)
        self._file = (folder / "tokens.npy").open("wb")
        self._file.write(bytes(_HEADER))

    @property
    def full(self) -> bool:
        return self.rows >= self.limit

    def add(self, ids: NDArray[np.int64]) -> int:
        """Append the tokens of a document; how many windows that filled."""
        left = np.concatenate((self._left, ids.astype(self.kind)))
        count = min(len(left) // self.width, self.limit - self.rows)
        self._file.write(left[: count * self.width].tobytes())
        self._left = left[count * self.width :]
        self.rows += count
        return count

    def close(self, identity: str, config: TextConfig) -> None:
        """Make the file a table; the manifest, written last, says that it is whole."""
        if not self.rows:
            raise LoopedError(
                f"the data is too short: {self.folder.name} got {len(self._left)} tokens, less than one window of "
                f"{self.width}; give more text or a smaller --data.window"
            )
        self._file.seek(0)
        header = {"descr": self.kind.str, "fortran_order": False, "shape": (self.rows, self.width)}
        np.lib.format.write_array_header_1_0(self._file, header)
        assert self._file.tell() == _HEADER
        self._file.close()
        tokens = self.rows * self.width
        manifest = {"identity": identity, "config": asdict(config), "rows": self.rows, "tokens": tokens}
        write_text(self.folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _identity(config: TextConfig, words: Words) -> str:
    """Hash of everything the result depends on: of local files their names and sizes, of a hub data set its name."""
    files = [[path.name, path.stat().st_size] for source in config.sources for path in find_files(source) or ()]
    same = {key: value for key, value in asdict(config).items() if key not in ("folder", "sources", "tokenizer")}
    names = [Path(source).name if Path(source).exists() else source for source in config.sources]
    vocabulary = sha256((words.folder / "tokenizer.json").read_bytes()).hexdigest()
    return sha256(json.dumps([same, names, files, vocabulary]).encode()).hexdigest()
