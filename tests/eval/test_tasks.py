"""Task names, data files, and prompts equal to the library's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looped.errors import LoopedError
from looped.eval.tasks import check_task, read_rows, task_names
from tests.eval.conftest import ROWS

EMBEDDED = ("wordmath", "wordmath-heldout", "wordmath-drills")


def contexts(task: Any, limit: int | None = None) -> list[str]:
    """The prompts that the library builds for a task."""
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [instance.args[0] for instance in task.instances]


def library_task(data: Path, folder: Path) -> Any:
    """gsm8k_cot as the library reads it, on a data file: nothing of ours takes part."""
    import lm_eval.tasks

    original = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k-cot.yaml"
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "reference.yaml").write_text(
        f"include: {original}\ntask: reference\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs:\n  cache_dir: {folder / 'cache'}\n  data_files:\n    test: {data}\n"
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    return manager.load(["reference"])["tasks"]["reference"]


def test_names() -> None:
    assert set(task_names()) == {"gsm8k", *EMBEDDED}
    assert check_task("gsm8k_cot") == check_task("gsm8k") == "gsm8k"
    assert check_task("wordmath_heldout") == "wordmath-heldout"
    with pytest.raises(LoopedError, match=r"unknown task 'wordmat'; did you mean 'wordmath'\?.*looped\.eval\.harness"):
        check_task("wordmat")


def test_gsm8k_prompts_and_protocol_are_the_librarys(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    from looped.eval.harness_task import load_task

    data = jsonl()
    loaded, reference = load_task("gsm8k", data), library_task(data, tmp_path)
    assert contexts(loaded.task) == contexts(reference)
    assert [loaded.task.doc_to_target(doc) for doc in loaded.task.eval_docs] == ["7", "3,000", "60"]
    ours, theirs = loaded.task.dump_config(), reference.dump_config()
    assert theirs["generation_kwargs"] | {"max_gen_toks": 256} == ours["generation_kwargs"]
    for key in ("filter_list", "metric_list", "output_type", "num_fewshot", "repeats"):
        assert ours[key] == theirs[key], key
    assert (loaded.protocol.version, loaded.protocol.num_fewshot) == (3.0, 8)
    assert loaded.protocol.until == ("Q:", "</s>", "<|im_end|>")


def test_gsm8k_prompt_of_the_real_test_set(shared: Callable[[str], Path]) -> None:
    from looped.eval.harness_task import load_task

    loaded = load_task("gsm8k", shared("data/gsm8k/test.jsonl"))
    (prompt,) = contexts(loaded.task, limit=1)
    assert len(loaded.task.eval_docs) == 1319
    assert len(prompt) == 2427
    assert prompt.startswith("Q: There are 15 trees in the grove.")
    assert prompt.index("Q: Janet") == 2141
    assert prompt.endswith("\nA:")


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_tasks_share_the_prompt(name: str, jsonl: Callable[..., Path]) -> None:
    from looped.eval.harness_task import load_task

    zero, eight = load_task(name), load_task(name, num_fewshot=8)
    assert zero.protocol.num_fewshot == 0
    assert len(zero.task.eval_docs) == 500
    question = zero.task.eval_docs[0]["question"]
    assert contexts(zero.task, 1) == [f"Q: {question}\nA:"]
    shots = contexts(load_task("gsm8k", jsonl()).task, 1)[0].removesuffix(f"Q: {ROWS[0]['question']}\nA:")
    assert contexts(eight.task, 1) == [f"{shots}Q: {question}\nA:"]
    reference = load_task("gsm8k", jsonl()).task.dump_config()
    for key in ("filter_list", "metric_list", "generation_kwargs"):
        assert zero.task.dump_config()[key] == reference[key], key


def test_a_task_serves_again_with_empty_responses() -> None:
    from looped.eval.harness_task import load_task

    task = load_task("wordmath").task
    contexts(task, 2)
    built = task.instances
    built[0].resps.append("an answer")
    contexts(task, 2)
    assert task.instances is built
    assert task.instances[0].resps == []
    assert len(contexts(task, 3)) == 3


def test_exemplars_beyond_those_there_are(jsonl: Callable[..., Path]) -> None:
    from looped.eval.harness_task import load_task

    with pytest.raises(LoopedError, match="between 0 and 8"):
        load_task("gsm8k", jsonl(), num_fewshot=9)


def test_a_task_file_with_other_scores_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from looped.eval.harness_task import load_task

    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "loose.yaml").write_text("task: loose\nmetric_list: [{metric: acc}]\n")
    monkeypatch.setattr("looped.eval.tasks.shipped", lambda path: tmp_path / path)
    with pytest.raises(LoopedError, match=r"the task loose has no exact_match by .*looped\.eval\.harness"):
        load_task("loose")


def test_gsm8k_without_network_says_what_to_do() -> None:
    from looped.eval.harness_task import load_task

    with pytest.raises(LoopedError, match=r"openai/gsm8k is not on this machine.*--data PATH"):
        load_task("gsm8k")


def test_rows_of_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read_rows(path) == ROWS
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(LoopedError, match=r"data\.parquet is not a Parquet file"):
        read_rows(path)


def test_rows_that_cannot_be_used(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(LoopedError, match=r"row 2 of .* has no answer; .*columns found: answer, question, text"):
        read_rows(jsonl([ROWS[0], {"question": "Who?", "text": "me"}]))
    with pytest.raises(LoopedError, match="has no question and no answer"):
        read_rows(jsonl([{"prompt": "Who?"}]))
    with pytest.raises(LoopedError, match="has no rows"):
        read_rows(jsonl([]))
    with pytest.raises(LoopedError, match="does not exist"):
        read_rows(tmp_path / "missing.jsonl")
    with pytest.raises(LoopedError, match="is a folder"):
        read_rows(tmp_path)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(ROWS[0]) + "\n{not json\n")
    with pytest.raises(LoopedError, match="line 2"):
        read_rows(broken)
