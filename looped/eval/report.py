"""Results as a table for people, as JSON for programs, and as files that are whole or absent."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped import __version__
from looped.columns import aligned
from looped.errors import LoopedError
from looped.eval.result import EvalResult, Sample, Score
from looped.files import check_folder, whole

if TYPE_CHECKING:
    from looped.model import LoopedLM

RESULTS, SAMPLES = "results.json", "samples.jsonl"
HEADER = ("task", "kv", "gate", "q / depth", "n", "strict", "flexible", "mean depth", "tok/s")


def table(results: Sequence[EvalResult]) -> str:
    """One row for each task and setting; exact match in percent with its standard error."""
    rows = [HEADER, *(_row(result) for result in results)]
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(aligned([rows[0], rule, *rows[1:]], left=range(3)))


def _row(result: EvalResult) -> tuple[str, ...]:
    if result.gate is not None and result.threshold is not None:
        gate = result.gate + (" (dense)" if result.dense_compute else "")
        gate += f" min {result.min_depth}" if result.setting.min_depth is not None else ""
        depth = f"{result.threshold:g}"
    else:
        gate, depth = "-", str(result.max_depth)
    return (
        result.task,
        result.kv,
        gate,
        depth,
        str(result.n),
        percent(result.strict),
        percent(result.flexible),
        _number(result.mean_depth, 2),
        _number(result.tok_s, 0),
    )


def percent(score: Score) -> str:
    """`81.4 ± 1.7`."""
    error = "" if score.stderr is None else f" ± {100 * score.stderr:.1f}"
    return f"{100 * score.value:.1f}{error}"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def line(result: EvalResult) -> str:
    """One result in one line, for a log."""
    return (
        f"{result.task}, {result.label}: flexible {percent(result.flexible)}, strict {percent(result.strict)}, "
        f"mean depth {_number(result.mean_depth, 2)}, {_number(result.tok_s, 0)} tok/s"
    )


def notes(results: Sequence[EvalResult]) -> list[str]:
    """What a reader of the table should know: cut prompts, answers that ran out of room. The worst setting of each."""
    found = []
    cut = max(results, key=lambda result: result.num_truncated / result.n)
    if cut.num_truncated:
        found.append(f"prompts cut on the left to fit: up to {cut.num_truncated} of {cut.n} ({cut.task}, {cut.label})")
    late = max(results, key=lambda result: result.num_unfinished / result.n)
    if late.num_unfinished:
        found.append(f"answers without an end: up to {late.num_unfinished} of {late.n} ({late.task}, {late.label})")
    return found


def as_json(results: Sequence[EvalResult], model: LoopedLM, seed: int, num_processes: int) -> dict[str, Any]:
    """One object: `scores[task][setting]`, and what it takes to repeat them."""
    scores: dict[str, dict[str, Any]] = {}
    for result in results:
        scores.setdefault(result.task, {})[result.label] = _entry(result)
    return {
        "scores": scores,
        "tasks": {result.task: dataclasses.asdict(result.protocol) for result in results},
        "model": {
            "name": model.name,
            "family": model.config.family,
            "revision": model.revision,
            "max_loops": model.config.max_loops,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        "seed": seed,
        "num_processes": num_processes,
        "lm_eval": importlib.metadata.version("lm_eval"),
        "looped": __version__,
    }


def _entry(result: EvalResult) -> dict[str, Any]:
    return {
        "kv": result.kv,
        "gate": result.gate,
        "threshold": result.threshold,
        "min_depth": result.min_depth,
        "max_depth": result.max_depth,
        "compute": "dense" if result.dense_compute else "sparse",
        "prefill": result.prefill,
        "prefill_threshold": result.setting.prefill_threshold,
        "prefill_cosine": result.setting.prefill_cosine,
        "prefill_protected": result.setting.prefill_protected,
        "mode": result.mode,
        "n": result.n,
        "exact_match_strict": result.strict.value,
        "exact_match_strict_stderr": result.strict.stderr,
        "exact_match_flexible": result.flexible.value,
        "exact_match_flexible_stderr": result.flexible.stderr,
        "mean_depth": _finite(result.mean_depth),
        "depth_histogram": list(result.depth_histogram),
        "tok_s": _finite(result.tok_s),
        "num_tokens": result.num_tokens,
        "seconds": result.seconds,
        "num_truncated_prompts": result.num_truncated,
        "num_unfinished": result.num_unfinished,
    }


def check_output(folder: Path, overwrite: bool) -> None:
    """Raise `LoopedError` if `folder` cannot take results, before hours go into them."""
    check_folder(folder)
    if (folder / RESULTS).exists() and not overwrite:
        raise LoopedError(f"{folder} already holds a run; give another --output folder, or --overwrite to replace it")


def write(folder: Path, summary: dict[str, Any], results: Iterable[EvalResult]) -> None:
    """`results.json` and `samples.jsonl` in `folder`; both appear whole, or neither does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = (_sample(result, sample) for result in results for sample in result.samples)
        with whole(folder / RESULTS) as scores, whole(folder / SAMPLES) as samples:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            samples.write_text(text, encoding="utf-8")
            scores.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise LoopedError(f"cannot write results into {folder}: {error.strerror or error}") from error


def _sample(result: EvalResult, sample: Sample) -> dict[str, Any]:
    return {
        "task": result.task,
        "setting": result.label,
        "doc_id": sample.doc_id,
        "question": sample.question,
        "target": sample.target,
        "text": sample.answer.text,
        "extracted": sample.extracted,
        "strict": sample.strict,
        "flexible": sample.flexible,
        "depths": list(sample.answer.depths),
        "finish_reason": sample.answer.finish_reason,
        "prompt_tokens": sample.answer.prompt_tokens,
    }
