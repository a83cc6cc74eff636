"""`looped demo`: the whole loop on an embedded model, in minutes: gates, scores, speed, a server, a report."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from looped.errors import LoopedError
from looped.options import option

if TYPE_CHECKING:
    from looped.analysis.results import DemoResults, Scores
    from looped.analysis.steps import Effort
    from looped.model import LoopedLM

T = TypeVar("T")
MARKER = ".looped-demo"
MARKER_TEXT = "looped demo made this folder and replaces it when it runs again.\n"


@dataclass(frozen=True)
class Options:
    """Distil gates, score them under KV layouts, bench the schedulers, serve a request, write a report."""

    output: Path = option(Path("out"), "folder for the report; replaced where an earlier demo made it")
    model: str = option("tiny-ouro", "a model with an exit gate of its own and a tokenizer: name or folder")
    num_problems: int | None = option(None, "problems of every score; 48, and 64 drills, when left out")
    quick: bool = option(False, "a smoke test: few tokens, few problems, numbers that mean little")


def run(options: Options) -> int:
    """All steps in turn. The output folder changes only when every one of them is done."""
    if options.num_problems is not None and options.num_problems < 2:
        raise LoopedError(f"--num-problems must be at least 2, got {options.num_problems}")
    check_output(options.output)
    started = time.monotonic()
    with staging(options.output) as folder:
        results = measure(options, folder)
        _step("report", 5, lambda: write(results, folder))
    from looped.analysis.summary import summary

    print(summary(results))
    print(f"\n{options.output / 'report.html'} has it all; {time.monotonic() - started:.0f} s")
    return 0


def measure(options: Options, folder: Path) -> DemoResults:
    """Every step but the report; the gates are left in `folder`/gates."""
    from looped.analysis import asking, scoring, steps
    from looped.analysis.results import DemoResults

    model = load(options.model)
    effort = effort_of(options)
    seconds: dict[str, float] = {}
    gates = _step("gates", 1, lambda: steps.distil(model, options.model, folder / "gates", effort), seconds)

    def score(task: str, cells: Callable[..., list[scoring.Cell]], n: int, limit: float) -> Scores:
        return scoring.score(model, cells(model, gates, folder / "gates", effort.full_grid), task, n, limit)

    scores, drills = _step(
        "scores",
        2,
        lambda: (
            score(steps.TASK, scoring.grid, effort.num_problems, effort.score_seconds),
            score(steps.DRILLS, scoring.own_layout, effort.num_drills, effort.drill_seconds),
        ),
        seconds,
    )
    bench = _step("bench", 3, lambda: steps.bench(model, effort), seconds)
    answers = _step("server", 4, lambda: asking.ask(model, options.model, effort.questions), seconds)
    return DemoResults(
        model=model.name,
        parameters=sum(p.numel() for p in model.parameters()),
        max_loops=model.config.max_loops,
        revision=model.revision,
        gates=gates,
        scores=scores,
        drills=drills,
        bench=bench,
        answers=answers,
        seconds=seconds,
        settings=machine(model),
        commands=commands(options, steps.threshold_of(model), scores.n, effort.bench_requests),
    )


def load(name: str) -> LoopedLM:
    """The model, refused where the demo has no use for it."""
    from looped.model import load as load_model

    model = load_model(name)
    if model.exit_gate is None:
        raise LoopedError(
            f"the demo needs a model with an exit gate of its own, and {model.name} has none; try tiny-ouro"
        )
    if model.tokenizer is None:
        raise LoopedError(f"the demo needs a tokenizer, and {model.name} has none; try tiny-ouro")
    return model


def effort_of(options: Options) -> Effort:
    from dataclasses import replace

    from looped.analysis.steps import QUICK, Effort

    effort = QUICK if options.quick else Effort()
    n = options.num_problems
    return effort if n is None else replace(effort, num_problems=n, num_drills=n)


def _step(name: str, number: int, work: Callable[[], T], seconds: dict[str, float] | None = None) -> T:
    """Run a step; a failure says which it was."""
    print(f"step {number}/5: {name}", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        result = work()
    except LoopedError as error:
        raise LoopedError(f"demo step {number}, {name}: {error}") from error
    except Exception:
        print(f"looped: demo step {number}, {name}, failed", file=sys.stderr, flush=True)
        raise
    if seconds is not None:
        seconds[name] = round(time.monotonic() - started, 1)
    return result


def write(results: DemoResults, folder: Path) -> None:
    """`report.html` and `results.json`."""
    from looped.analysis.report import render
    from looped.analysis.results import to_json

    (folder / "report.html").write_text(render(results), encoding="utf-8")
    (folder / "results.json").write_text(to_json(results), encoding="utf-8")


def machine(model: LoopedLM) -> dict[str, str]:
    """What the numbers depend on."""
    import os

    import torch

    import looped

    return {
        "model": f"{model.name}, weights {model.revision[:12]}",
        "device": f"{model.device}, {str(model.dtype).removeprefix('torch.')}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "threads": str(torch.get_num_threads()),
        "versions": f"looped {looped.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "seed": "0; generation is greedy",
    }


def commands(options: Options, threshold: float, n: int, requests: int) -> tuple[tuple[str, str], ...]:
    """The steps by themselves."""
    model, gates = options.model, options.output / "gates"
    return (
        ("Distil both gates", f"looped train-gate --teacher {model} --gate all --output {gates}"),
        (
            "Score layouts and gates",
            f"looped eval wordmath --model {model} --kv ragged,shared,first-shared --gate ouro,{gates / 'lookahead'} "
            f"--threshold {threshold:g} --num-fewshot 0 --limit {n}",
        ),
        (
            "Measure the schedulers",
            f"looped bench offline --model {model} --threshold {threshold:g} --num-requests {requests}",
        ),
        ("Serve", f"looped serve --model {model} --threshold {threshold:g}"),
        (
            "See depth in the terminal",
            f'looped generate "Q: Tom has 3 boxes of 12 eggs. How many eggs?\\nA:" --model {model}',
        ),
    )


def check_output(folder: Path) -> None:
    """Refuse a folder that no demo made, unless it is empty: the demo deletes what it replaces."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise LoopedError(f"{folder} is no folder; give another --output")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise LoopedError(f"{folder} holds files that no demo made, and would be replaced; give another --output")


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place at the end, or goes away if anything fails or is interrupted."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise LoopedError(f"cannot write beside {output} ({error.strerror}); give another --output") from error
    try:
        folder.chmod(0o755)
        (folder / MARKER).write_text(MARKER_TEXT)
        yield folder
        check_output(output)
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
