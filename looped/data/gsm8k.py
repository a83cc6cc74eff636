"""GSM8K's training problems in the package's own shape. The test split is never read for training."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from looped.data.rows import Row, read_file
from looped.errors import LoopedError

HUB = "openai/gsm8k"
_CALCULATION = re.compile(r"<<[^<>]*>>")


class Solved(NamedTuple):
    """A question with its solution on one line and the final answer as a string."""

    question: str
    chain: str
    answer: str

    @property
    def said(self) -> str:
        """The chain and, in a sentence of its own, the answer."""
        chain = f"{self.chain} " if self.chain else ""
        return f"{chain}The answer is {self.answer}."

    def document(self) -> str:
        return f"Q: {self.question}\nA: {self.said}"


def solved(question: str, answer: str) -> Solved:
    """`... <<1+1=2>>2 ... #### 2` becomes a chain without calculator marks and a final answer without commas."""
    chain, mark, final = answer.rpartition("####")
    if not mark:
        chain, final = "", answer
    chain = " ".join(_CALCULATION.sub("", chain).split())
    if chain and chain[-1] not in ".!?":
        chain += "."
    return Solved(" ".join(question.split()), chain, final.strip().replace(",", ""))


def columns(rows: Iterable[Row]) -> list[str]:
    return sorted({key for row in rows for key in row})


def gsm8k_train(source: str = HUB) -> list[Solved]:
    """The training problems from a JSONL file (fields question, answer) or from the hub through `datasets`."""
    if source == HUB:
        from looped.data.hub import find_hub

        rows = list(find_hub(f"{HUB}:main:train").open(0))
    else:
        rows = [row for row, _, _ in read_file(Path(source))]
    if not rows or not all("question" in row and "answer" in row for row in rows):
        raise LoopedError(
            f"{source} must have the columns question and answer; it has {', '.join(columns(rows)) or 'no rows'}."
        )
    return [solved(str(row["question"]), str(row["answer"])) for row in rows]
