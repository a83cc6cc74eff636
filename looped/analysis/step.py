"""`looped bench step`: how long each stage takes, against the least it could take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from looped.analysis.chosen import choose_model
from looped.analysis.fits import fit_depths, fit_steps
from looped.analysis.floors import Ceilings, Demand, Work
from looped.analysis.latency import FORMAT, DepthLine, Kernel, Point, StepResult
from looped.analysis.latency_text import table
from looped.errors import LoopedError
from looped.options import option
from looped.progress import last_json

if TYPE_CHECKING:
    from looped.analysis.stepper import Stepper, Timing

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (128, 512, 2048, 8192)
NUM_KERNELS = 20
PREFILLS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class StepOptions:
    """Times of a core step, prelude, coda, a whole decode step and a prefill, against their floors.

    The floor is the larger of bytes over the bandwidth and FLOPs over the peak, both measured in the same run.
    """

    model: str | None = option(None, "name, hub id or folder; tiny-ouro when neither this nor --random is given")
    random: str | None = option(None, "random weights of a public shape: ouro-1.4b, ouro-2.6b, huginn-3.5b, micro-…")
    kv: str | None = option(None, "KV layout; the model's own when left out")
    max_loops: int | None = option(None, "R, the loop steps the model is run with")
    batch: tuple[int, ...] = option((), "batch sizes (default: 1,2,4,...,512 on a GPU, to 8 on a CPU)")
    context: tuple[int, ...] = option((), "keys of each row (default: 128,512,2048,8192 on a GPU, 32,128 on a CPU)")
    depth: tuple[int, ...] = option((), "depths of whole decode steps; 1..R, or five of them when left out")
    prefill: tuple[int, ...] = option((), "prompt tokens of a prefill (default: 128,512,2048,8192 or 32,128)")
    exits: Literal["sync", "device"] = option("sync", "device: the core step that also runs coda and prelude for exits")
    repeats: int = option(16, "tokens that are timed, behind two that warm up")
    max_len: int | None = option(None, "context the engine is built for; what the largest --context needs if left out")
    backend: str = option("auto", "attention backend")
    page_size: int | None = option(None, "tokens a page")
    graphs: bool = option(True, "CUDA graphs")
    device: str | None = option(None, "cpu or cuda; the first GPU, else the CPU, when left out")
    dtype: Literal["float32", "bfloat16", "float64"] | None = option(
        None, "type of weights and KV; bfloat16 on a GPU, else float32, when left out"
    )
    kernels: bool = option(False, "list the kernels of a whole decode step, longest first, from a profile")
    out: Path | None = option(None, "write the result as JSON to this file")
    plot: Path | None = option(None, "draw the core step's times to this SVG file")
    json: bool = option(True, "end with one line of JSON")


def run_step(options: StepOptions) -> int:
    from looped.analysis.latency_plot import plot
    from looped.files import write_text
    from looped.progress import plain

    _check_files(options.out, options.plot)
    result = measure(options)
    print(table(result))
    if options.out is not None:
        import json

        write_text(options.out, json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    if options.plot is not None:
        write_text(options.plot, plot(result))
    if options.json:
        last_json(result)
    return 0


def _check_files(*paths: Path | None) -> None:
    """Say before the long part that a file cannot be written."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise LoopedError(f"{path} cannot be written: there is no folder {path.resolve().parent}")


def measure(options: StepOptions) -> StepResult:
    """Measure all combinations that fit. Raises `LoopedError` for a wrong option."""
    from looped.analysis import device as devices
    from looped.analysis.stepper import WARM_UP, Stepper
    from looped.infer.options import EngineOptions
    from looped.model.loading import parse_device
    from looped.progress import progress

    gpu = parse_device(options.device).type == "cuda"
    batches = _sizes("--batch", options.batch, BATCHES if gpu else BATCHES[:4])
    contexts = _sizes("--context", options.context, CONTEXTS if gpu else (32, 128))
    prefills = _sizes("--prefill", options.prefill, PREFILLS if gpu else (32, 128))
    longest = max(max(contexts), max(prefills)) + WARM_UP + options.repeats + 8
    model = choose_model(
        options.model, options.random, options.device, options.dtype, options.max_loops, options.max_len, longest
    )
    depths = _depths(options.depth, model.config.max_loops)
    ceilings = devices.measure_ceilings(model.device, model.dtype)
    engine = EngineOptions(
        mode="refill",
        kv=options.kv,
        exits=options.exits,
        max_num_seqs=max(batches),
        min_coda_batch=1,
        max_num_batched_tokens=max(8192, max(prefills)),
        page_size=options.page_size,
        backend=options.backend,
        graphs=options.graphs,
        preemption="off",
    )
    stepper, demand = Stepper(model, engine, options.repeats), Demand(model.config, model.dtype.itemsize)
    print(stepper.engine.describe())
    points: list[Point] = []
    left_out: list[str] = []
    used: list[Kernel] = []
    with progress(len(batches) * len(contexts) + len(prefills), "bench step") as bar:
        for context in contexts:
            for batch in batches:
                found = _settled(stepper, batch, context, depths, ceilings)
                points += found
                if found and options.kernels:
                    used += _kernels(stepper, batch, context)
                if not found:
                    left_out.append(f"batch {batch} at context {context}")
                bar.advance(note=f"batch {batch}, context {context}")
        for tokens in prefills:
            timing = stepper.prefill(tokens)
            work = demand.prefill(tokens, stepper.max_loops)
            if timing is None:
                left_out.append(f"prefill of {tokens}")
            else:
                points.append(_point("prefill", tokens, 0, stepper.max_loops, timing, work, ceilings))
            bar.advance(note=f"prefill {tokens}")
    settings = _settings(stepper, options, devices.describe(model.device))
    return replace(summarise(points, ceilings, left_out, stepper.fused, settings), kernels=tuple(used))


def summarise(
    points: Sequence[Point],
    ceilings: Ceilings,
    left_out: Sequence[str],
    fused: bool,
    settings: dict[str, str | int | float | None],
) -> StepResult:
    """Fits over the points. A loop step is the slope over depths where there is one, else as it was measured."""
    wholes: dict[tuple[int, int], dict[int, float]] = {}
    steps = {(p.batch, p.context): p.seconds for p in points if p.stage == "core"}
    for point in points:
        if point.stage == "decode":
            wholes.setdefault((point.batch, point.context), {})[point.depth] = point.seconds
    lines = []
    for (batch, context), seconds in wholes.items():
        fit = fit_depths(seconds)
        if fit is not None:
            lines.append(DepthLine(batch, context, fit))
            steps[batch, context] = fit.step
    step_fit = fit_steps([(batch, context, seconds) for (batch, context), seconds in steps.items()])
    return StepResult(
        FORMAT,
        tuple(points),
        ceilings.bytes_s,
        ceilings.flops_s,
        tuple(lines),
        step_fit,
        tuple(left_out),
        fused,
        settings,
    )


def _settled(stepper: Stepper, batch: int, context: int, depths: Sequence[int], ceilings: Ceilings) -> list[Point]:
    """Points of one batch and context; none where it does not fit."""
    demand, deepest, found = Demand(stepper.model.config, stepper.model.dtype.itemsize), max(depths), []
    for depth in depths:
        if not stepper.room(context) or not stepper.settle(batch, context):
            return []
        took = stepper.measure(context, depth)
        whole = demand.decode(batch, context, depth)
        found.append(_point("decode", batch, context, depth, took.decode, whole, ceilings))
        if depth != deepest:
            continue
        if stepper.fused:
            work = demand.core(batch, context) + demand.coda(batch, context) + demand.prelude(batch, context)
            found.append(_point("core", batch, context, depth, took.core, work, ceilings))
            continue
        for stage, timing in (("core", took.core), ("prelude", took.prelude), ("coda", took.coda)):
            work = getattr(demand, stage)(batch, context)
            found.append(_point(stage, batch, context, depth, timing, work, ceilings))
    stepper.clear()
    return found


def _kernels(stepper: Stepper, batch: int, context: int) -> list[Kernel]:
    """What runs in a token of full depth, from a profile of its own, so that timed tokens are not slowed by one."""
    from looped.analysis.profile import kernels

    stepper.settle(batch, context)
    used = kernels(lambda: stepper.measure(context, stepper.max_loops), stepper.model.device)
    stepper.clear()
    used = [(name, calls, s) for name, calls, s in used if "spin_kernel" not in name]  # the head start
    tokens = stepper.passes
    return [Kernel(batch, context, name, calls / tokens, s / tokens) for name, calls, s in used[:NUM_KERNELS]]


def _point(stage: str, batch: int, context: int, depth: int, timing: Timing, work: Work, ceilings: Ceilings) -> Point:
    floor = work.floor(ceilings)
    seconds = timing.seconds
    return Point(
        stage,
        batch,
        context,
        depth,
        seconds,
        timing.spread,
        floor,
        seconds / floor,
        work.num_bytes / seconds / 1e12,
        work.flops / seconds / 1e12,
    )


def _sizes(flag: str, given: Sequence[int], default: Sequence[int]) -> list[int]:
    """Sizes in rising order, each once."""
    sizes = sorted(set(given or default))
    if sizes[0] < 1:
        raise LoopedError(f"{flag} takes whole numbers of at least 1, got {sizes[0]}")
    return sizes


def _depths(given: Sequence[int], max_loops: int) -> list[int]:
    """The depths asked for; else all up to four, five of them (the paper's for R = 16) above."""
    if not given:
        few = range(1, max_loops + 1) if max_loops <= 4 else (max_loops * k // 8 for k in (1, 2, 4, 6, 8))
        return sorted({max(1, depth) for depth in few})
    if not all(1 <= depth <= max_loops for depth in given):
        raise LoopedError(f"--depth takes depths between 1 and {max_loops}, got {', '.join(map(str, given))}")
    return sorted(set(given))


def _settings(stepper: Stepper, options: StepOptions, name: str) -> dict[str, str | int | float | None]:
    import torch

    engine, model = stepper.engine, stepper.model
    return {
        "model": model.name,
        "max_loops": stepper.max_loops,
        "kv": engine.policy.layout.name,
        "device": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": engine.runner.backend.describe(),
        "page_size": engine.kv.page_size,
        "graphs": engine.runner.graphs.describe(),
        "capture_seconds": round(engine.runner.graphs.seconds, 2),
        "capture_bytes": engine.runner.graphs.num_bytes,
        "max_len": engine.kv.max_len,
        "exits": options.exits,
        "repeats": stepper.repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
