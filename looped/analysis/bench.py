"""`looped bench`: measure the engine against its bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from looped.analysis.step import StepOptions, run_step
from looped.options import option
from looped.progress import last_json

if TYPE_CHECKING:
    from looped.analysis.offline import OfflineResult, Setup
    from looped.gates import Gate
    from looped.model import LoopedLM

# A hazard gate at a threshold of 1 never exits; what to measure instead when nobody said.
HAZARD_THRESHOLD = 0.5


@dataclass(frozen=True)
class OfflineOptions:
    """One work list under cb, no-refill and refill: tokens a second against the bound on the speedup."""

    model: str = option("tiny-ouro", "name, hub id or folder")
    kv: str | None = option(None, "KV layout; the model's own when left out")
    gate: str | None = option(None, "exit gate; the model's own when left out")
    threshold: float | None = option(None, "exit threshold; the gate's own when left out")
    max_loops: int | None = option(None, "R, the loop steps the model is run with")
    max_num_seqs: int = option(8, "W, sequences active at once")
    min_coda_batch: int | None = option(None, "K, exits before the coda runs; 1 for fully looped models, else W // 4")
    num_requests: int = option(16, "requests in the work list")
    prompts: Path | None = option(None, "file of prompts (eval/workloads/README.md); word problems when left out")
    input_len: int | None = option(None, "random token ids of this length as prompts")
    output_len: int | None = option(
        None, "new tokens of every request; the file's, or those of the solution, when left out"
    )
    ignore_eos: bool = option(True, "generate the full length, so that every scheduler does the same work")
    replay_depths: str = option("none", "exit depths to replay in place of the gate: uniform, or 2:0.5,3:0.3,4:0.2")
    modes: tuple[Literal["cb", "no-refill", "refill"], ...] = option(("cb", "no-refill", "refill"), "schedulers")
    repeats: int = option(5, "rounds; the schedulers take turns in each")
    max_seconds: float | None = option(28.0, "start no round that would end later; `none` runs all of them")
    seed: int = option(0, "seed of prompts and replayed depths")
    device: str | None = option(None, "cpu or cuda; the first GPU, else the CPU, when left out")
    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", "type of weights and KV")
    json: bool = option(False, "end with one line of JSON")


def run_offline(options: OfflineOptions) -> int:
    from looped.analysis.offline import measure

    setup, notes = prepare(options)
    for note in notes:
        print(note)
    result = measure(setup, options.modes, options.repeats, options.max_seconds)
    print(table(result))
    if options.json:
        last_json(result)
    return 0


def prepare(options: OfflineOptions) -> tuple[Setup, list[str]]:
    """The bench's setup, and in words what was chosen for the user. Raises `LoopedError` for a wrong option."""
    from looped.analysis import worklist
    from looped.analysis.offline import Setup
    from looped.model import load

    model = load(options.model, device=options.device, dtype=options.dtype, max_loops=options.max_loops)
    work = worklist.build(
        model, options.num_requests, options.prompts, options.input_len, options.output_len, options.seed
    )
    gate, threshold, notes = _gate(options, model)
    if options.replay_depths != "none":
        from looped.errors import LoopedError
        from looped.gates import ReplayGate

        if options.gate is not None or options.threshold is not None:
            raise LoopedError("--replay-depths takes the place of the gate: leave out --gate and --threshold")
        shares = worklist.parse_depths(options.replay_depths, model.config.max_loops)
        gate, threshold = ReplayGate(worklist.draw_depths(work, shares, options.seed)), None
        shown = ", ".join(f"{depth}: {share:g}" for depth, share in sorted(shares.items()))
        notes = [f"replayed exit depths, drawn per token from {shown} with seed {options.seed}"]
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
    )
    return setup, notes


def _gate(options: OfflineOptions, model: LoopedLM) -> tuple[Gate, float | None, list[str]]:
    """The gate asked for, or the model's own, and its threshold where the default is not the one to use."""
    from looped.gates import OuroGate, get_gate, native_gate

    gate = native_gate(model) if options.gate is None else get_gate(options.gate, model)
    default = gate.default_threshold(model.config)
    if options.threshold is None and isinstance(gate, OuroGate) and default >= 1:
        note = f"{model.name} comes with threshold {default:g}, at which nothing exits; measured at {HAZARD_THRESHOLD}"
        return gate, HAZARD_THRESHOLD, [note]
    return gate, options.threshold, []


def table(result: OfflineResult) -> str:
    """The result for a terminal."""
    told = result.settings
    gate = told["gate"] or "no gate"
    if told["gate"] and told["gate"] != "replay":
        gate = f"{gate} gate at {told['threshold']:g}"
    lines = [
        f"{told['model']} (R {told['max_loops']}), {told['kv']} layout, {gate}, {told['device']}, {told['dtype']}, "
        f"{told['threads']} threads",
        f"{told['num_requests']} requests ({told['work_list']}), {result.prompt_tokens} prompt tokens, {result.tokens} "
        f"generated, W {told['max_num_seqs']}, K {told['min_coda_batch']}, {result.rounds} rounds",
        "",
        f"{'scheduler':<10} {'tok/s':>8} {'spread':>7} {'x cb':>6} {'of S_e2e':>9} {'core batch':>11}",
    ]
    for name, mode in result.modes.items():
        speedup = "" if mode.speedup is None else f"{mode.speedup:.2f}"
        realised = "" if mode.realised is None else f"{mode.realised:.0%}"
        batch = f"{mode.mean_core_batch:.1f}"
        lines.append(f"{name:<10} {mode.tok_s:>8.1f} {mode.spread:>7.1%} {speedup:>6} {realised:>9} {batch:>11}")
    return "\n".join([*lines, "", *_bound_lines(result)])


def _bound_lines(result: OfflineResult) -> list[str]:
    total = max(1, sum(result.depth_counts))
    exits = ", ".join(f"{depth}: {count / total:.0%}" for depth, count in enumerate(result.depth_counts) if depth)
    lines = [
        f"mean depth {result.mean_depth:.2f} ({result.mean_depth_with_first:.2f} with first tokens); exits at {exits}",
        f"S_dec {result.s_dec:.3f}",
    ]
    if result.s_e2e is not None and result.prefill_share is not None:
        lines[1] = (
            f"prefill takes {result.prefill_share:.1%} of cb's time, so S_dec {result.s_dec:.3f} becomes "
            f"S_e2e {result.s_e2e:.3f}"
        )
        strict = result.decode_only
        lines.append(
            f"without first tokens (the prefill's own): S_dec {strict.s_dec:.3f}, S_e2e {strict.s_e2e or 0:.3f}, "
            f"realised {strict.realised or 0:.0%}"
        )
    return [*lines, result.agreement]


VERBS = {"offline": (OfflineOptions, run_offline), "step": (StepOptions, run_step)}
