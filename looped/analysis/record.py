"""`looped record`: exits of reference answers at every threshold, from one pass over each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from looped.analysis.chosen import choose_model
from looped.errors import LoopedError
from looped.options import option
from looped.progress import last_json

if TYPE_CHECKING:
    from looped.analysis.exit_files import Recorded

# Thresholds of the table, by gate.
_HAZARDS, _SMALL = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9), (1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1)
SHOWN = {
    "convergence": (0.02, 0.06, 0.1, 0.16, 0.2, 0.28),
    "argmax-stability": (1, 2, 3, 4, 5),
    **dict.fromkeys(("cosine", "entropy-diff", "kl", "minp-kl"), _SMALL),
}


@dataclass(frozen=True)
class Options:
    """Record how a gate would let the tokens of reference answers leave, at every threshold.

    One teacher-forced pass at full depth over each prompt and its answer, so depths come from full-depth K/V. The file
    goes into `looped bench offline --replay-depths FILE.npz --replay-threshold 0.2`.
    """

    model: str | None = option(None, "name, hub id or folder; tiny-ouro when neither this nor --random is given")
    random: str | None = option(None, "random weights of a public shape, see `looped bench step`")
    gate: str | None = option(None, "exit gate; the model's own when left out")
    max_loops: int | None = option(None, "R, the loop steps the model is run with")
    prompts: Path | None = option(
        None, "file with prompts and reference answers (eval/workloads/README.md); word problems when left out"
    )
    num_requests: int = option(16, "requests of the file")
    seed: int = option(0, "seed of word problems")
    out: Path = option(Path("exits.npz"), "file to write")
    device: str | None = option(None, "cpu or cuda; the first GPU, else the CPU, when left out")
    dtype: Literal["float32", "bfloat16", "float64"] | None = option(
        None, "type of weights; bfloat16 on a GPU, else float32, when left out"
    )
    json: bool = option(False, "end with one line of JSON")


def run(options: Options) -> int:
    """Record and write. Raises `LoopedError` for a mistake in the options."""
    from looped.analysis import exit_files, worklist
    from looped.analysis.recorder import record
    from looped.gates import get_gate, native_gate

    if not options.out.resolve().parent.is_dir():
        raise LoopedError(f"{options.out} cannot be written: there is no folder {options.out.resolve().parent}")
    model = choose_model(options.model, options.random, options.device, options.dtype, options.max_loops)
    work = worklist.build(model, options.num_requests, options.prompts, seed=options.seed)
    gate = native_gate(model) if options.gate is None else get_gate(options.gate, model)
    recorded = record(model, gate, work)
    exit_files.write(options.out, recorded)
    print(table(recorded))
    print(f"\n{options.out} has {len(recorded.offsets_N) - 1} requests, {len(recorded.values_TR)} decode tokens")
    if options.json:
        last_json({"out": options.out, "tokens": len(recorded.values_TR), "meta": recorded.meta})
    return 0


def table(recorded: Recorded) -> str:
    """Mean depth and exit shares at some thresholds."""
    meta = recorded.meta
    lines = [f"{meta.model} (R {meta.max_loops}), {meta.gate} gate", f"{'threshold':>9} {'mean depth':>10}  exits"]
    for threshold in SHOWN.get(meta.gate.removeprefix("delayed-"), _HAZARDS):
        depths = [depth for exits in recorded.exits(threshold) for depth in exits]
        if depths:
            shares = {depth: depths.count(depth) / len(depths) for depth in sorted(set(depths))}
            shown = ", ".join(f"{depth}: {share:.0%}" for depth, share in shares.items())
            lines.append(f"{threshold:>9g} {sum(depths) / len(depths):>10.2f}  {shown}")
    return "\n".join(lines)
