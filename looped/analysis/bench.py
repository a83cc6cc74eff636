"""`looped bench`: measure the engine against its bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from looped.analysis.offline_text import table
from looped.analysis.step import StepOptions, run_step
from looped.errors import LoopedError
from looped.options import option
from looped.progress import last_json

if TYPE_CHECKING:
    from looped.analysis.offline_summary import Setup
    from looped.analysis.worklist import WorkList
    from looped.gates import Gate
    from looped.model import LoopedLM

# A hazard gate at a threshold of 1 never exits; what to measure instead when nobody said.
HAZARD_THRESHOLD = 0.5


@dataclass(frozen=True)
class OfflineOptions:
    """One work list under cb, no-refill and refill: tokens a second against the bound on the speedup."""

    model: str | None = option(None, "name, hub id or folder; tiny-ouro when neither this nor --random is given")
    random: str | None = option(None, "random weights of a public shape: ouro-1.4b, ouro-2.6b, huginn-3.5b, micro-…")
    kv: str | None = option(None, "KV layout; the model's own when left out")
    gate: str | None = option(None, "exit gate; the model's own when left out")
    threshold: float | None = option(None, "exit threshold; the gate's own when left out")
    max_loops: int | None = option(None, "R, the loop steps the model is run with")
    prefill: Literal["dense", "ragged"] = option("dense", "ragged lets prompt tokens leave early (not under cb)")
    prefill_threshold: float | None = option(None, "exit threshold of a ragged prefill; that of decode when left out")
    exits: Literal["auto", "sync", "lookahead", "device"] = option(
        "auto", "how the host learns of exits; auto: device on a GPU, else sync"
    )
    max_num_seqs: int = option(8, "W, sequences active at once")
    min_coda_batch: int | None = option(None, "K, exits before the coda runs; 1 for fully looped models, else W // 4")
    max_num_batched_tokens: int = option(8192, "M, prompt tokens of a prefill batch")
    min_free_slots: int | None = option(None, "S, free slots before a prefill interrupts decode; max(1, W // 8)")
    num_requests: int = option(16, "requests in the work list")
    prompts: Path | None = option(
        None, "alpaca, sharegpt, arxiv, several joined by +, or a file (eval/workloads/README.md); else word problems"
    )
    input_len: int | None = option(None, "random token ids of this length as prompts")
    output_len: int | None = option(
        None, "new tokens of every request; the file's, or those of the solution, when left out"
    )
    ignore_eos: bool = option(True, "generate the full length, so that every scheduler does the same work")
    replay_depths: str = option(
        "none", "exits to replay in place of the gate: uniform, 2:0.5,3:0.3,4:0.2, lists, or a file of them"
    )
    replay_threshold: float | None = option(None, "threshold at which a file of `looped record` is read; its own")
    record_exits: Path | None = option(None, "write the depths of the last scheduler's tokens to this .jsonl file")
    modes: tuple[Literal["cb", "no-refill", "refill"], ...] = option(("cb", "no-refill", "refill"), "schedulers")
    repeats: int = option(5, "rounds; the schedulers take turns in each")
    max_seconds: float | None = option(28.0, "start no round that would end later; `none` runs all of them")
    latencies: Path | None = option(None, "what `looped bench step --out` wrote: compare with the schedule it allows")
    profile: Path | None = option(None, "write a chrome trace of 50 steady steps of each scheduler; also GPU idle time")
    seed: int = option(0, "seed of prompts and replayed depths")
    max_len: int | None = option(None, "context the engine is built for; the model's when left out")
    num_pages: int | None = option(None, "core pages of each engine's KV pool; what the list needs when left out")
    page_size: int | None = option(None, "tokens a page")
    preemption: Literal["auto", "recompute", "offload", "off"] = option("auto", "what makes room in a full pool")
    mix_prefill: bool = option(False, "prompt pieces ride along with core steps (not cb)")
    chunk_size: int | None = option(None, "prompts are cut at its multiples")
    backend: str = option("auto", "attention backend")
    graphs: bool = option(True, "CUDA graphs")
    device: str | None = option(None, "cpu or cuda; the first GPU, else the CPU, when left out")
    dtype: Literal["float32", "bfloat16", "float64"] | None = option(
        None, "type of weights and KV; bfloat16 on a GPU, else float32, when left out"
    )
    out: Path | None = option(None, "write the result as JSON to this file")
    json: bool = option(False, "end with one line of JSON")


def run_offline(options: OfflineOptions) -> int:
    import json

    from looped.analysis.offline import measure_all
    from looped.files import write_text
    from looped.progress import plain

    for path in (options.record_exits, options.out, options.profile):
        if path is not None and not path.resolve().parent.is_dir():
            raise LoopedError(f"{path} cannot be written: there is no folder {path.resolve().parent}")
    if options.record_exits is not None and options.modes[-1:] == ("cb",):
        raise LoopedError(
            "--record-exits takes the depths of the last of --modes, and cb runs every token at full depth"
        )
    if options.prefill == "ragged" and options.modes == ("cb",):
        raise LoopedError("--prefill ragged needs a scheduler with exits among --modes; cb runs every token in full")
    setup, notes = prepare(options)
    for note in notes:
        print(note)
    measured = measure_all(setup, options.modes, options.repeats, options.max_seconds, trace=options.profile)
    print(table(measured.result))
    if options.record_exits is not None:
        rows = (json.dumps({"depths": depths}) + "\n" for depths in measured.depths)
        write_text(options.record_exits, "".join(rows))
    if options.out is not None:
        write_text(options.out, json.dumps(plain(measured.result), indent=1, allow_nan=False) + "\n")
    if options.json:
        last_json(measured.result)
    return 0


def prepare(options: OfflineOptions) -> tuple[Setup, list[str]]:
    """The bench's setup, and in words what was chosen for the user. Raises `LoopedError` for a wrong option."""
    from looped.analysis import latency, worklist
    from looped.analysis.chosen import choose_model
    from looped.analysis.offline_summary import Setup
    from looped.infer.options import EngineOptions

    latencies = None if options.latencies is None else latency.read(options.latencies)
    model = choose_model(
        options.model, options.random, options.device, options.dtype, options.max_loops, options.max_len
    )
    work = worklist.build(
        model, options.num_requests, options.prompts, options.input_len, options.output_len, options.seed
    )
    gate, threshold, notes = _exits(options, model, work)
    engine = EngineOptions(
        prefill=options.prefill,
        prefill_threshold=options.prefill_threshold,
        exits=options.exits,
        max_num_batched_tokens=options.max_num_batched_tokens,
        min_free_slots=options.min_free_slots,
        num_pages=options.num_pages,
        page_size=options.page_size,
        preemption=options.preemption,
        mix_prefill=options.mix_prefill,
        chunk_size=options.chunk_size,
        backend=options.backend,
        graphs=options.graphs,
    )
    setup = Setup(
        model,
        work,
        options.kv,
        gate,
        threshold,
        options.max_num_seqs,
        options.min_coda_batch,
        options.ignore_eos,
        options.seed,
        engine,
        latencies,
    )
    return setup, notes


def _exits(options: OfflineOptions, model: LoopedLM, work: WorkList) -> tuple[Gate, float | None, list[str]]:
    """What decides when a token leaves: the depths to replay, or a gate with its threshold."""
    from looped.analysis.replay import replayed
    from looped.gates import ReplayGate

    if options.replay_depths == "none":
        if options.replay_threshold is not None:
            raise LoopedError("--replay-threshold needs a file of `looped record` as --replay-depths")
        return _gate(options, model)
    if options.gate is not None or options.threshold is not None:
        raise LoopedError("--replay-depths takes the place of the gate: leave out --gate and --threshold")
    depths, note = replayed(options.replay_depths, work, model.config.max_loops, options.replay_threshold, options.seed)
    return ReplayGate(depths), None, [note]


def _gate(options: OfflineOptions, model: LoopedLM) -> tuple[Gate, float | None, list[str]]:
    """The gate asked for, or the model's own, and its threshold where the default is not the one to use."""
    from looped.gates import OuroGate, get_gate, native_gate

    gate = native_gate(model) if options.gate is None else get_gate(options.gate, model)
    if gate.needs_logits:
        note = f"the {gate.name} gate runs the coda after every loop step, which the bounds do not count"
        return gate, options.threshold, [note]
    default = gate.default_threshold(model.config)
    if options.threshold is None and isinstance(gate, OuroGate) and default >= 1:
        note = f"{model.name} comes with threshold {default:g}, at which nothing exits; measured at {HAZARD_THRESHOLD}"
        return gate, HAZARD_THRESHOLD, [note]
    return gate, options.threshold, []


VERBS = {"offline": (OfflineOptions, run_offline), "step": (StepOptions, run_step)}
