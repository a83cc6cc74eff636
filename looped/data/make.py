"""Writes the committed data files again, byte for byte.

python -m looped.data.make tokenizer GSM8K_TRAIN_JSONL looped/assets/tokenizer
python -m looped.data.make evalsets eval/wordmath
"""

from __future__ import annotations

import sys
from pathlib import Path

from looped.data import tokenizer
from looped.data.evalsets import write_eval_files
from looped.data.gsm8k import gsm8k_train
from looped.errors import LoopedError


def make_tokenizer(gsm8k: str, folder: Path) -> None:
    """Trains the shared tokenizer on the generators' sample and the GSM8K training problems."""
    extra = (f"{item.document()}\n\n" for item in gsm8k_train(gsm8k))
    tokenizer.save(tokenizer.train(tokenizer.sample(extra)), folder)


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["tokenizer", gsm8k, folder]:
                make_tokenizer(gsm8k, Path(folder))
            case ["evalsets", folder]:
                write_eval_files(Path(folder))
            case _:
                raise LoopedError(
                    f"got {' '.join(arguments) or 'nothing'}; give 'tokenizer GSM8K FOLDER' or 'evalsets FOLDER'."
                )
    except LoopedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
