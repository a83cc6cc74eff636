"""GSM8K's training problems in the package's own shape. The test split is never read for training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file. Raises LoopedError with the line that does not parse."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoopedError(f"cannot read the data file {path} ({error}); give a UTF-8 JSONL file.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LoopedError(f"{path}, line {number}, is not JSON; give one object a line.") from error
        if not isinstance(row, dict):
            raise LoopedError(f"{path}, line {number}, is not a JSON object; give one object a line.")
        rows.append(row)
    return rows


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({key for row in rows for key in row})


def gsm8k_train(source: str = HUB) -> list[Solved]:
    """The training problems from a JSONL file (fields question, answer) or from the hub through `datasets`."""
    if source == HUB:
        from looped.data.documents import hub_rows

        rows = hub_rows(HUB, "train", config="main")
    else:
        rows = read_jsonl(Path(source))
    if not rows or not all("question" in row and "answer" in row for row in rows):
        raise LoopedError(
            f"{source} must have the columns question and answer; it has {', '.join(columns(rows)) or 'no rows'}."
        )
    return [solved(str(row["question"]), str(row["answer"])) for row in rows]
