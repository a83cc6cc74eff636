"""`looped trace`: the schedule of a run, stage by stage, in the form of the paper's tables 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from looped.analysis import depths as exit_depths
from looped.analysis.printed import NUM_STAGES, PRESETS, Preset
from looped.analysis.simulate import Totals, Workload, simulate, sums
from looped.columns import aligned
from looped.errors import LoopedError
from looped.infer.scheduler import POLICIES, Limits, Stage, TraceRow
from looped.options import option
from looped.progress import last_json

if TYPE_CHECKING:
    from looped.model import LoopedLM

_REQUESTS, _PROMPT_LEN, _OUTPUT_LEN = 16, 128, 8
_OURO_LOOPS, _HUGINN_LOOPS = 4, 16
# Flags that say something about a run without a model alone, or about a run of one alone.
_SIMULATED, _ENGINE = ("exits", "preset", "fully_looped"), ("prompt", "kv", "gate", "threshold")


@dataclass(frozen=True)
class Options:
    """Print which stage runs when, on how many sequences, and what waits behind it.

    Without --model only the scheduler runs: exits come from --exits, or from a trace that the paper prints. With
    --model the engine runs, and its gate decides. All requests are there from the start.
    """

    exits: str | None = option(
        None, "exit depths: lists as JSON, a .json or .jsonl file of them, or a distribution such as 1:0.2,2:0.5,4:0.3"
    )
    preset: str | None = option(None, "workload of a printed trace; other flags change it", choices=tuple(PRESETS))
    model: str | None = option(None, "run the engine on this model: name, hub id or folder")
    prompt: str | None = option(None, "with --model: text that every request continues; word problems when left out")
    kv: str | None = option(None, "with --model: KV layout; the model's own when left out")
    gate: str | None = option(None, "with --model: exit gate; the model's own when left out")
    threshold: float | None = option(None, "with --model: exit threshold; the gate's own when left out")
    requests: int | None = option(None, "number of requests; as many as there are lists, else 16, when left out")
    prompt_len: tuple[int, ...] = option((), "prompt tokens, of every request or one number each (default: 128)")
    output_len: int | None = option(
        None, "new tokens of a request, the first by its prompt (default: all its exits, or 8)"
    )
    mode: str | None = option(None, "scheduler (default: refill)", choices=tuple(POLICIES))
    max_num_seqs: int = option(64, "W, sequences active at once")
    max_num_batched_tokens: int = option(8192, "M, prompt tokens of a prefill batch")
    min_free_slots: int | None = option(None, "S, free slots before a prefill interrupts decode; max(1, W // 8)")
    min_coda_batch: int | None = option(None, "K, exits before the coda runs; 1 for fully looped models, else W // 4")
    fully_looped: bool | None = option(
        None, "no layers outside the loop: decides the defaults of K and R; the preset's, else on, when left out"
    )
    max_loops: int | None = option(None, "R, the most loop steps; 4, or 16 where not fully looped, when left out")
    stages: int | None = option(None, "show this many stages; all of them, or the 20 of a preset, when left out")
    seed: int = option(0, "seed of drawn exits and of prompts")
    format: Literal["text", "json"] = option("text", "a table, or one line of JSON")


class Traced(NamedTuple):
    """A run: what it was, its rows, and how many requests waited before the first."""

    settings: dict[str, Any]
    limits: Limits
    rows: Sequence[TraceRow]
    num_requests: int

    @property
    def totals(self) -> Totals:
        return sums(self.rows, self.limits.max_num_seqs)


def run(options: Options) -> int:
    """Print the schedule. Raises LoopedError for a mistake in the options."""
    _check(options)
    traced = _engine(options) if options.model is not None else _simulated(options)
    if options.format == "json":
        last_json(as_json(traced))
    else:
        print(table(traced))
    return 0


def _check(options: Options) -> None:
    """Refuse flags of the other kind of run, and numbers out of range."""
    other, kind = (_SIMULATED, "without") if options.model is not None else (_ENGINE, "with")
    for name in other:
        if getattr(options, name) is not None:
            raise LoopedError(f"--{name.replace('_', '-')} is for a run {kind} --model")
    for name in ("requests", "output_len", "max_loops", "stages"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise LoopedError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if any(length < 1 for length in options.prompt_len):
        raise LoopedError(f"--prompt-len must be at least 1, got {min(options.prompt_len)}")
    if options.model is None and options.exits is None and options.preset is None:
        raise LoopedError(
            "give --exits (such as 1:0.2,2:0.5,4:0.3), --preset "
            f"({', '.join(PRESETS)}) or --model: without one nothing says when tokens leave"
        )


def _simulated(options: Options) -> Traced:
    """The scheduler alone, on given exits."""
    preset = None if options.preset is None else PRESETS[options.preset]
    fully_looped = options.fully_looped
    if fully_looped is None:
        fully_looped = preset is None or preset.fully_looped
    mode = options.mode or (preset.mode if preset else "refill")
    loops = options.max_loops or (preset.max_loops if preset else _OURO_LOOPS if fully_looped else _HUGINN_LOOPS)
    min_coda_batch = options.min_coda_batch
    if min_coda_batch is None and preset is not None:
        min_coda_batch = preset.min_coda_batch
    limits = Limits.of(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.min_free_slots,
        min_coda_batch,
        fully_looped=fully_looped,
    )
    work = _workload(options, preset, loops)
    stages = options.stages or (NUM_STAGES if preset else None)
    source = options.exits if options.exits is not None else preset.source if preset else ""
    settings = {"mode": mode, "max_loops": loops, "source": source, "seed": options.seed}
    return Traced(settings, limits, simulate(mode, limits, work, loops, stages), len(work.exits))


def _workload(options: Options, preset: Preset | None, loops: int) -> Workload:
    """Prompt lengths and exits of every request: what was given, else the preset's, else the defaults."""
    prompt_lens = options.prompt_len or (preset.work.prompt_lens if preset else (_PROMPT_LEN,))
    each = len(options.prompt_len) if len(options.prompt_len) > 1 else None
    lists: Sequence[exit_depths.Exits]
    if options.exits is None:
        assert preset is not None
        lists = [tuple(min(depth, loops) for depth in exits) for exits in preset.work.exits]
    elif exit_depths.is_lists(options.exits):
        lists = exit_depths.parse_lists(options.exits, loops, "--exits")
    else:
        shares = exit_depths.parse_shares(options.exits, loops, "--exits")
        drawn = options.requests or each or (len(prompt_lens) if preset else _REQUESTS)
        lists = exit_depths.draw(shares, drawn, (options.output_len or _OUTPUT_LEN) - 1, options.seed)
    num = options.requests or each or len(lists)
    if each is not None and each != num:
        raise LoopedError(f"--prompt-len gives {each} numbers for {num} requests; give one, or one for each")
    exits = [lists[i % len(lists)] for i in range(num)]
    if options.output_len is not None:
        passes = options.output_len - 1
        exits = [given[:passes] + (loops,) * (passes - len(given)) for given in exits]
    return Workload(tuple(prompt_lens[i % len(prompt_lens)] for i in range(num)), tuple(exits))


def _engine(options: Options) -> Traced:
    """The engine, with its scheduler's trace switched on. The host waits for the exits of every core step, so that
    it can tell them."""
    from looped.gates import OuroGate, get_gate
    from looped.infer import LLM, SamplingParams
    from looped.model import load

    assert options.model is not None
    model = load(options.model, max_loops=options.max_loops)
    prompts = _prompts(options, model)
    gate = get_gate(options.gate or "native", model)
    threshold = gate.default_threshold(model.config) if options.threshold is None else options.threshold
    if options.threshold is None and isinstance(gate, OuroGate) and threshold >= 1:
        threshold = 0.5  # at the threshold of 1 that checkpoints come with, nothing exits
    mode = options.mode or "refill"
    llm = LLM(
        model,
        mode,
        kv=options.kv,
        gate=gate,
        threshold=threshold,
        exits="sync",
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        min_free_slots=options.min_free_slots,
        min_coda_batch=options.min_coda_batch,
        seed=options.seed,
    )
    scheduler = llm.engine.scheduler
    rows: list[TraceRow] = []
    scheduler.trace = rows
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len or _OUTPUT_LEN, ignore_eos=True)
    llm.generate(prompts, params)
    exits = "full depth" if mode == "cb" else f"{gate.name} gate at {threshold:g}"
    source = f"{model.name}, {llm.engine.policy.layout.name} layout, {exits}"
    settings = {"mode": mode, "max_loops": model.config.max_loops, "source": source, "seed": options.seed}
    return Traced(settings, scheduler.limits, rows[: options.stages], len(prompts))


def _prompts(options: Options, model: LoopedLM) -> list[list[int]]:
    """Token ids: the prompt given, random ones of the length given, or word problems."""
    from looped.analysis import worklist

    num = options.requests or _REQUESTS
    if len(options.prompt_len) > 1:
        raise LoopedError("--prompt-len takes one number with --model: that of random token ids in every prompt")
    if options.prompt is None:
        length = options.prompt_len[0] if options.prompt_len else None
        work = worklist.build(model, num, None, length, options.output_len or _OUTPUT_LEN, options.seed)
        return [list(item.prompt_ids) for item in work.items]
    if options.prompt_len:
        raise LoopedError("--prompt gives the prompt, --prompt-len makes random ones: give one of the two")
    if model.tokenizer is None:
        raise LoopedError(f"{model.name} has no tokenizer, so it cannot read --prompt; give --prompt-len")
    return [model.tokenizer.encode(options.prompt)] * num


def as_json(traced: Traced) -> dict[str, Any]:
    """What `--format json` prints."""
    limits = {name: value for name, value in asdict(traced.limits).items() if name != "kv_headroom"}
    rows = [
        {
            "step": number,
            "stage": row.stage.value,
            "batch": row.batch,
            "prompt_tokens": row.prompt_tokens,
            "steps": {str(step): num for step, num in row.steps},
            "exits": row.exits,
            "queues": {"prelude": row.prelude, "core": row.core, "coda": row.coda, "waiting": row.waiting},
        }
        for number, row in enumerate(traced.rows, start=1)
    ]
    settings = traced.settings | limits | {"num_requests": traced.num_requests}
    return {"settings": settings, "rows": rows, "totals": asdict(traced.totals)}


def table(traced: Traced) -> str:
    """The schedule as aligned columns. Queues as the paper shows them: under `refill` Q_R of the core, Q_C of the coda
    and Q_P of prompts; else Q_D of the tokens that the next cohort decodes, and Q_P."""
    limits, told = traced.limits, traced.settings
    lines = [
        f"{told['mode']}, W {limits.max_num_seqs}, M {limits.max_num_batched_tokens}, S {limits.min_free_slots}, "
        f"K {limits.min_coda_batch}, R {told['max_loops']}; {traced.num_requests} requests ({told['source']})",
        "",
    ]
    lines += aligned(list(_cells(traced)), left=(1, 3))
    return "\n".join([*lines, "", *_totals_lines(traced)])


def _cells(traced: Traced) -> Iterator[list[str]]:
    """Head, the state before the first stage, and a row for each stage."""
    refill = traced.settings["mode"] == "refill"
    queues = ["Q_R", "Q_C", "Q_P"] if refill else ["Q_D", "Q_P"]
    yield ["#", "stage", "B", "detail", "exits", *queues]
    yield ["0", "init", "", "", "", *["0"] * (len(queues) - 1), str(traced.num_requests)]
    before = Stage.PREFILL
    for number, row in enumerate(traced.rows, start=1):
        lengths = (row.core, row.coda, row.waiting) if refill else (row.prelude, row.waiting)
        exits = str(row.exits) if row.exits else ""
        yield [str(number), row.stage, str(row.batch), _detail(row, before, traced), exits, *map(str, lengths)]
        before = row.stage


def _detail(row: TraceRow, before: Stage, traced: Traced) -> str:
    if row.stage is Stage.PREFILL:
        return f"{row.prompt_tokens} prompt tokens"
    if row.stage is Stage.PRELUDE:
        return f"after {before}"
    if row.stage is Stage.CORE:
        return " ".join(f"r{step}:{num}" for step, num in row.steps)
    least = traced.limits.min_coda_batch
    if row.stage is Stage.CODA and traced.settings["mode"] == "refill" and least > 1:
        return f"Q_C >= {least}" if row.batch >= least else "nothing else to run"
    return ""


def _totals_lines(traced: Traced) -> list[str]:
    totals = traced.totals
    launches = ", ".join(f"{name} {num}" for name, num in totals.launches.items())
    lines = [f"launches: {launches}; {totals.prompt_tokens} prompt tokens, {totals.exits} exits"]
    if totals.occupancy is not None:
        lines.append(
            f"core rows {totals.core_rows}, which fill {totals.ideal_core_launches:.1f} launches of "
            f"{traced.limits.max_num_seqs}; occupancy {totals.occupancy:.1%}"
        )
    return lines
