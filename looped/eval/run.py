"""`looped eval`: a grid of tasks, KV layouts and depth policies, every setting one row of a table.

Also the module for `accelerate launch -m looped.eval.run TASK ...`.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from looped.errors import LoopedError
from looped.eval.distributed import World, is_member, join, launch
from looped.eval.result import EvalResult
from looped.eval.setting import Setting, grid
from looped.eval.tasks import GSM8K, check_task, read_rows
from looped.options import argument, option
from looped.server.choices import COSINE_DOC, PROTECTED_DOC, check_prefill

if TYPE_CHECKING:
    from looped.eval.harness_task import LoadedTask
    from looped.model import LoopedLM


@dataclasses.dataclass(frozen=True)
class Options:
    """Score a model on tasks under KV layouts and depth policies, through lm-evaluation-harness.

    TASK is gsm8k (its gsm8k_cot), wordmath, wordmath-heldout or wordmath-drills. Commas give a grid: every task is
    scored under every layout with every gate and threshold, or every fixed depth. Without --gate and --depth tokens run
    at full depth.
    """

    task: tuple[str, ...] = argument("one or more tasks")
    model: str = option("tiny-ouro", "name, hub id or folder of the model")
    kv: tuple[str, ...] = option(
        (), "KV layouts: depth, last-exited, ragged, shared, first-shared, modulo-m; the model's own when left out"
    )
    gate: tuple[str, ...] = option((), "exit gates: names or folders; none is full depth")
    threshold: tuple[float, ...] = option((), "exit thresholds; each gate's own when left out")
    min_depth: int | None = option(None, "loops before a gate may exit; the gate's own when left out")
    depth: tuple[int, ...] = option((), "fixed depths, for prompt and answer alike, in place of a gate")
    compute: Literal["sparse", "dense"] = option(
        "sparse", "dense runs and stores all loops; a gate then only picks the output"
    )
    data: Path | None = option(
        None, "JSONL or Parquet file with question and answer: the data of gsm8k, or of the one task named"
    )
    limit: int | None = option(None, "only the first N documents of each task")
    num_fewshot: int | None = option(None, "exemplars before each question; the task's own number when left out")
    max_gen_toks: int = option(256, "most tokens of an answer")
    prefill: Literal["dense", "ragged"] = option(
        "dense", "ragged lets prompt tokens leave early, in settings with a gate"
    )
    prefill_threshold: float | None = option(None, "exit threshold of a ragged prefill; that of decode when left out")
    prefill_cosine: bool = option(False, COSINE_DOC)
    prefill_protected: int = option(0, PROTECTED_DOC)
    mode: Literal["refill", "no-refill", "cb"] = option("refill", "the engine's scheduler")
    exits: Literal["auto", "sync", "lookahead", "device"] = option(
        "auto", "how the host learns of exits; auto: device on a GPU, else sync"
    )
    backend: str = option("auto", "attention backend")
    max_num_seqs: int = option(64, "sequences that run at the same time")
    max_loops: int | None = option(None, "R; the checkpoint's own when left out")
    device: str | None = option(None, "cpu, cuda, cuda:1; the first GPU when left out, else the CPU")
    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", "weights and activations")
    seed: int = option(0, "seed of what is random: Huginn's initial state, sampling")
    num_processes: int = option(1, "processes that share the documents, one a GPU")
    output: Path | None = option(None, "folder for results.json and samples.jsonl")
    overwrite: bool = option(False, "replace a run that --output already holds")
    json: bool = option(False, "end with one line of JSON: scores by task and setting")


def run(options: Options) -> int:
    """The verb. Everything that can be wrong without the model is found before the slow imports."""
    _check(options)
    if options.num_processes > 1 and not is_member():
        return launch(_share, options, options.num_processes)
    try:
        return _share(options)
    except LoopedError:
        if is_member() and _rank() != 0:
            return 2  # rank 0 says it
        raise


def _names(options: Options) -> list[str]:
    """The tasks, each once: words on the line, or one word with commas."""
    words = [name.strip() for word in options.task for name in word.split(",")]
    names = list(dict.fromkeys(check_task(name) for name in words if name))
    if not names:
        raise LoopedError("TASK is empty; name one or more tasks, such as wordmath")
    return names


def _data_for(options: Options) -> str:
    """The task that --data belongs to: the only one, or gsm8k, since the others bring their own."""
    names = _names(options)
    if len(names) > 1 and GSM8K not in names:
        raise LoopedError(f"--data serves one task, but {len(names)} were named; run them one by one")
    return GSM8K if GSM8K in names else names[0]


def _check(options: Options) -> None:
    _names(options)
    check_prefill(options.prefill, options.prefill_threshold, options.prefill_cosine, options.prefill_protected)
    _check_engine(options)
    _grid(options)
    at_least = {"num_processes": 1, "limit": 1, "max_gen_toks": 1, "num_fewshot": 0, "max_num_seqs": 1}
    for name, least in at_least.items():
        given = getattr(options, name)
        if given is not None and given < least:
            raise LoopedError(f"--{name.replace('_', '-')} must be at least {least}, got {given}")
    if options.data is not None:
        _data_for(options)
        read_rows(options.data)
    if options.output is not None:
        from looped.eval.report import check_output

        check_output(options.output, options.overwrite)


def _check_engine(options: Options) -> None:
    from looped.infer.options import EngineOptions

    EngineOptions(
        mode=options.mode, prefill=options.prefill, max_num_seqs=options.max_num_seqs, seed=options.seed
    ).check()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _grid(options: Options) -> list[Setting]:
    prefill = Setting(
        prefill=options.prefill,
        prefill_threshold=options.prefill_threshold,
        prefill_cosine=options.prefill_cosine,
        prefill_protected=options.prefill_protected,
    )
    return grid(options.kv, options.gate, options.threshold, options.depth, options.min_depth, options.compute, prefill)


def _share(options: Options) -> int:
    """What one process does: all of it, or a rank's share; rank 0 prints and writes."""
    from looped.infer.engine import check_exits
    from looped.model import load

    world = join(options.device)
    model = load(options.model, world.device or options.device, options.dtype, options.max_loops)
    settings = _grid(options)
    for setting in settings:
        policy = setting.policy(model)
        if options.mode != "cb":  # which looks at no gate
            check_exits(options.exits, policy)  # the last cell of the grid must not fail after hours
    tasks = _tasks(options)
    results = _score_all(options, model, settings, tasks, world)
    if world.rank == 0:
        _report(options, model, results, world)
    return 0


def _tasks(options: Options) -> list[LoadedTask]:
    from looped.eval.harness_task import load_task

    data = {} if options.data is None else {_data_for(options): options.data}
    return [load_task(name, data.get(name), options.num_fewshot, options.max_gen_toks) for name in _names(options)]


def _score_all(
    options: Options, model: LoopedLM, settings: Sequence[Setting], tasks: Sequence[LoadedTask], world: World
) -> list[EvalResult]:
    """Every task under every setting, in the table's order; empty on ranks other than 0."""
    from looped.eval.evaluate import make_llm, score
    from looped.eval.report import line

    found: dict[tuple[int, int], EvalResult] = {}
    total = len(settings) * len(tasks)
    for column, setting in enumerate(settings):
        llm = make_llm(model, setting, options.mode, options.max_num_seqs, options.seed, options.exits, options.backend)
        for row, task in enumerate(tasks):
            result = score(llm, task, setting, options.limit, world, show=total == 1 or sys.stderr.isatty())
            if result is not None:
                found[row, column] = result
                print(f"[{len(found)}/{total}] {line(result)}", file=sys.stderr, flush=True)
        del llm
        if column + 1 < len(settings):
            _free(model)
    return [found[place] for place in sorted(found)]


def _free(model: LoopedLM) -> None:
    """Give the KV pool of the last engine back before the next one measures what is free."""
    gc.collect()
    if model.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _report(options: Options, model: LoopedLM, results: Sequence[EvalResult], world: World) -> None:
    from looped.eval.report import as_json, notes, table, write
    from looped.progress import last_json

    print(table(results))
    for note in notes(results):
        print(note)
    summary = as_json(results, model, options.seed, world.size)
    if options.output is not None:
        write(options.output, summary, results)
        print(f"results in {options.output}")
    if options.json:
        last_json(summary)


if __name__ == "__main__":
    sys.argv.insert(1, "eval")
    runpy.run_module("looped", run_name="__main__", alter_sys=True)  # `python -m looped eval`, by a name of its own
