"""Score one model on one task under one setting."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped.errors import LoopedError
from looped.eval.distributed import ALONE, World
from looped.eval.result import FLEXIBLE, STRICT, Answer, EvalResult, Sample, Score
from looped.eval.setting import Setting, label
from looped.infer import LLM
from looped.model import LoopedLM, load

if TYPE_CHECKING:
    from looped.eval.harness_task import LoadedTask


def evaluate(
    model: str | Path | LoopedLM,
    task: str | LoadedTask,
    setting: Setting | None = None,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    max_gen_toks: int = 256,
    data: str | Path | None = None,
    mode: str = "refill",
    max_num_seqs: int = 64,
    seed: int = 0,
    show_progress: bool = False,
) -> EvalResult:
    """Exact match, mean depth and speed of a model on a task.

    `task` is a name (then `num_fewshot`, `max_gen_toks` and `data` shape it) or a task from `load_task`, which scores
    many settings without being built again. `limit`: only that many documents, from the first on. `mode` is the
    engine's scheduler. Raises `LoopedError` for unknown names and for what the model, task or data cannot do.
    """
    from looped.eval.harness_task import load_task

    loaded = load_task(task, data, num_fewshot, max_gen_toks) if isinstance(task, str) else task
    lm = model if isinstance(model, LoopedLM) else load(model)
    llm = make_llm(lm, setting or Setting(), mode, max_num_seqs, seed)
    result = score(llm, loaded, setting or Setting(), limit, show=show_progress)
    assert result is not None  # only the ranks beyond 0 have none
    return result


def make_llm(
    model: LoopedLM,
    setting: Setting,
    mode: str,
    max_num_seqs: int,
    seed: int,
    exits: str = "auto",
    backend: str = "auto",
) -> LLM:
    """An engine for one setting; mode, exits and backend change its speed and never its answers."""
    return LLM(
        model,
        mode=mode,
        kv=setting.kv,
        gate=setting.gate,
        threshold=setting.threshold,
        min_depth=setting.min_depth,
        depth=setting.depth,
        compute=setting.compute,
        prefill=setting.prefill,
        prefill_threshold=setting.schedule,
        exits=exits,
        backend=backend,
        max_num_seqs=max_num_seqs,
        seed=seed,
    )


def score(
    llm: LLM, loaded: LoadedTask, setting: Setting, limit: int | None = None, world: World = ALONE, show: bool = False
) -> EvalResult | None:
    """The same with an engine at hand; in a world of several ranks, rank 0 has the result and the others None."""
    import lm_eval.evaluator

    from looped.eval.lm import HarnessLM

    task, protocol = loaded
    if limit is not None and limit < 1:
        raise LoopedError(f"limit must be at least 1, got {limit}")
    count = min(len(task.eval_docs), limit or len(task.eval_docs))
    if count < world.size:
        raise LoopedError(f"{count} documents cannot be shared by {world.size} processes; use fewer processes")
    lm = HarnessLM(llm, protocol.max_gen_toks, setting.depth, world, show and world.rank == 0)
    output = lm_eval.evaluator.evaluate(lm, {"tasks": {protocol.task: task}}, limit=limit)
    shares = world.gather_object((list(lm.answers.values()), lm.num_tokens, lm.seconds))
    if output is None or shares is None:
        return None
    answers = [answer for share, _, _ in shares for answer in share]
    policy = llm.engine.policy
    return EvalResult(
        protocol=protocol,
        setting=setting,
        label=label(setting, policy),
        kv=policy.layout.name,
        gate=setting.gate_label(),
        threshold=policy.threshold if policy.gate else None,
        min_depth=policy.min_depth if policy.gate else None,
        max_depth=policy.max_depth,
        dense_compute=policy.dense_compute,
        prefill="dense" if policy.prefill is None else "ragged",
        mode=llm.engine.options.mode,
        n=len(answers),
        strict=_score(output["results"][protocol.task], STRICT),
        flexible=_score(output["results"][protocol.task], FLEXIBLE),
        depth_histogram=_histogram(answers, policy.max_depth),
        num_tokens=sum(tokens for _, tokens, _ in shares),
        seconds=max(seconds for _, _, seconds in shares),
        num_truncated=sum(answer.truncated for answer in answers),
        num_unfinished=sum(answer.finish_reason == "length" for answer in answers),
        samples=_samples(output["samples"][protocol.task], answers),
    )


def _score(metrics: dict[str, Any], filter_name: str) -> Score:
    stderr = metrics[f"exact_match_stderr,{filter_name}"]
    value = float(metrics[f"exact_match,{filter_name}"])
    return Score(value, float(stderr) if isinstance(stderr, int | float) else None)


def _histogram(answers: Iterable[Answer], max_depth: int) -> tuple[int, ...]:
    """Decode tokens by exit depth: all but the first token of each answer."""
    counts = [0] * max_depth
    for answer in answers:
        for depth in answer.depths[1:]:
            counts[depth - 1] += 1
    return tuple(counts)


def _samples(rows: Iterable[dict[str, Any]], answers: Iterable[Answer]) -> tuple[Sample, ...]:
    """The library's log has one row for each document and filter; ours one for each document, with its depths."""
    by_doc: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_doc.setdefault(row["doc_id"], {})[row["filter"]] = row
    samples = []
    for answer in sorted(answers, key=lambda answer: answer.doc_id):
        strict, flexible = by_doc[answer.doc_id][STRICT], by_doc[answer.doc_id][FLEXIBLE]
        samples.append(
            Sample(
                doc_id=answer.doc_id,
                question=flexible["doc"]["question"],
                target=str(flexible["target"]),
                answer=answer,
                strict=bool(strict["exact_match"]),
                flexible=bool(flexible["exact_match"]),
                extracted=str(flexible["filtered_resps"][0]),
            )
        )
    return tuple(samples)
