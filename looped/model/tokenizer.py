"""Text to token ids and back, from a checkpoint's `tokenizer.json`, without network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from looped.errors import LoopedError
from looped.files import read_object

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer. Prompts never end in an end-of-text token, whatever the post-processor adds."""

    def __init__(self, folder: Path, eos_ids: tuple[int, ...]) -> None:
        self.folder = folder
        self._eos_ids = eos_ids
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise LoopedError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        config = folder / "tokenizer_config.json"
        self.settings = read_object(config) if config.exists() else {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens the checkpoint puts in front, none at the end."""
        # As a batch of one: the library then lets other threads run, which long texts keep waiting for seconds.
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        if add_special_tokens and token_ids and token_ids[-1] in self._eos_ids:
            token_ids.pop()
        return token_ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that go on from others: no special tokens are put around them."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's own: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
        file = self.folder / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8")
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            by_name = {entry.get("name"): entry.get("template") for entry in template}
            template = by_name.get("default")
        return template if isinstance(template, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens, which templates and clients ask for by name."""
        settings = dict(self.settings)
        file = self.folder / "special_tokens_map.json"
        if file.exists():
            settings = read_object(file) | settings
        tokens = {name: settings.get(name) for name in SPECIAL_TOKENS}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def longest_token(self) -> int | None:
        """Characters that a token stands for at most, so that a text's length says how many tokens it has at least.
        None where the tokenizer may drop characters, or take any number of them for one token."""
        spec = json.loads(self._inner.to_str())
        cuts = spec["pre_tokenizer"] or {}
        cuts = cuts.get("pretokenizers", [cuts])
        keeps = all(
            cut.get("type") in ("ByteLevel", "Digits") or (cut.get("type") == "Split" and cut["behavior"] != "Removed")
            for cut in cuts
        )
        every_byte = any(cut.get("type") == "ByteLevel" for cut in cuts)
        strips = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        if not (keeps and every_byte) or strips or spec["normalizer"] or spec["truncation"]:
            return None
        return max(map(len, self._inner.get_vocab()))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's text, None where there is no such token."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        size: int = self._inner.get_vocab_size()
        return size


def find_tokenizer(folder: Path, eos_ids: tuple[int, ...]) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, None when it has none."""
    return Tokenizer(folder, eos_ids) if (folder / "tokenizer.json").exists() else None
