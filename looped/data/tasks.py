"""Task definitions for lm-evaluation-harness 0.4.13: prompt, filters, stop strings and metric of its `gsm8k_cot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from looped.data.evalsets import eval_items
from looped.data.exemplars import exemplars
from looped.data.gsm8k import HUB, columns, read_jsonl
from looped.errors import LoopedError, unknown

_SETS = {"wordmath": "trained", "wordmath_heldout": "heldout", "wordmath_drills": "drills"}
TASKS = (*_SETS, "gsm8k")

STRICT = r"The answer is (\-?[0-9\.\,]+)."
FLEXIBLE = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
STOPS = ("Q:", "</s>", "<|im_end|>")


def task_dict(name: str, data_path: str | None = None, num_fewshot: int = 0, max_tokens: int = 256) -> dict[str, Any]:
    """The configuration of one task, ready for `simple_evaluate(tasks=[...])`.

    `name`: wordmath, wordmath_heldout, wordmath_drills or gsm8k. `data_path`: a JSONL file with the fields question and
    answer (`... #### N`); None takes the embedded set, for gsm8k the hub's test split. `num_fewshot`: 0 to 8 of the
    public exemplars. Raises LoopedError for an unknown name, a missing column or a wrong number of examples.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    if not 0 <= num_fewshot <= len(exemplars()):
        raise LoopedError(f"num_fewshot is {num_fewshot}; give 0 to {len(exemplars())}, the number of exemplars.")
    return {
        "task": name,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{answer.split('####')[-1].strip() if answer is defined else target}}",
        "fewshot_config": {"sampler": "first_n", "samples": [e._asdict() for e in exemplars()]},
        "num_fewshot": num_fewshot,
        "repeats": 1,
        "generation_kwargs": {"do_sample": False, "until": list(STOPS), "max_gen_toks": max_tokens},
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [{"function": "regex", "regex_pattern": STRICT}, {"function": "take_first"}],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": FLEXIBLE},
                    {"function": "take_first"},
                ],
            },
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"],
            }
        ],
        "metadata": {"version": 3.0 if name == "gsm8k" else 1.0},
        **_data(name, data_path),
    }


def _data(name: str, data_path: str | None) -> dict[str, Any]:
    if data_path is not None:
        path = Path(data_path)
        if not path.is_file():
            raise LoopedError(f"there is no data file {data_path}; give a JSONL file with question and answer.")
        rows = read_jsonl(path)
        if not rows or not all({"question", "answer"} <= row.keys() for row in rows):
            found = ", ".join(columns(rows)) or "no rows"
            raise LoopedError(f"{data_path} needs the columns question and answer; it has {found}.")
        return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path.resolve())}}}
    if name in _SETS:
        return {"custom_dataset": lambda **_: dataset(_SETS[name])}
    return {"dataset_path": HUB, "dataset_name": "main"}


def dataset(name: str) -> dict[str, Any]:
    """An evaluation set as lm-eval takes it: {"test": datasets.Dataset}, generated, so that no file has to be found."""
    from datasets import Dataset

    return {"test": Dataset.from_list([item._asdict() for item in eval_items(name)])}
