"""`looped generate`: continue a text in the terminal, tokens coloured by exit depth."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from looped.analysis.palette import ansi, depth_counts, histogram
from looped.errors import LoopedError
from looped.options import argument, option
from looped.progress import last_json
from looped.server.choices import GATE_DOC, NATIVE, pick_gate

if TYPE_CHECKING:
    from looped.infer import LLM, Output, SamplingParams


@dataclass(frozen=True)
class Options:
    """Continue a text; every token is coloured by the number of loops it took."""

    text: str = argument("the prompt; - reads it from standard input")
    model: str = option("tiny-ouro", "name, hub id or folder")
    kv: str | None = option(None, "KV layout; the model's own when left out")
    gate: str = option(NATIVE, GATE_DOC)
    threshold: float | None = option(None, "exit threshold; the gate's, else the model's, when left out")
    min_depth: int | None = option(None, "fewest loops of a token; the gate's when left out")
    depth: int | None = option(None, "run with fewer loops, prompt and decode alike")
    mode: str = option("refill", "scheduler: refill, no-refill or cb (every token at full depth)")
    max_tokens: int = option(128, "most tokens to generate")
    temperature: float = option(0.0, "0 is greedy")
    top_p: float = option(1.0, "draw from the likeliest tokens that have this share of the probability together")
    top_k: int = option(0, "draw from this many of the likeliest tokens; 0 is all")
    min_p: float = option(0.0, "draw from tokens with at least this share of the likeliest one's probability")
    repetition_penalty: float = option(1.0, "above 1: against tokens that occurred, in the prompt too")
    presence_penalty: float = option(0.0, "subtracted from the logits of tokens that were generated, -2 to 2")
    frequency_penalty: float = option(0.0, "the same, as often as they were generated")
    min_tokens: int = option(0, "fewest tokens before an end-of-text token or --stop may end the text")
    stop: str | None = option(None, "a text that ends the continuation and is cut from it")
    seed: int = option(0, "seed of sampling, and of models that start from noise")
    ignore_eos: bool = option(False, "go on after an end-of-text token")
    max_loops: int | None = option(None, "R, where it differs from the checkpoint's")
    device: str | None = option(None, "cpu or cuda; the first GPU when left out, else the CPU")
    dtype: str = option("float32", "float32, bfloat16 or float64")
    color: bool = option(True, "colours on a terminal; NO_COLOR in the environment turns them off too")
    json: bool = option(False, "end in one line of JSON: text, token_ids, depths, mean_depth, finish_reason")


@dataclass(frozen=True)
class Generated:
    """What --json prints. `mean_depth` is over the tokens after the first, which the prompt's pass produces."""

    text: str
    token_ids: list[int]
    depths: list[int]
    mean_depth: float | None
    finish_reason: str


def run(options: Options) -> int:
    """Stream the continuation to stdout and a legend to stderr."""
    prompt = read_prompt(options.text)
    params = sampling(options)
    llm = build(options)
    if llm.model.tokenizer is None:
        raise LoopedError(f"{llm.model.name} has no tokenizer, so it cannot read a text; use looped.LLM with token ids")
    max_depth = llm.engine.policy.max_depth
    started = time.perf_counter()
    writer = Writer(sys.stdout, max_depth, colored(options.color, sys.stdout))
    for output in generate(llm, llm.model.tokenizer.encode(prompt), params):
        writer.take(output)
    seconds = time.perf_counter() - started
    result = writer.result()
    print(flush=True)
    print(legend(result, max_depth, seconds, colored(options.color, sys.stderr)), file=sys.stderr, flush=True)
    if options.json:
        last_json(result)
    return 0


def read_prompt(text: str) -> str:
    """The prompt, from standard input for "-". Raises `LoopedError` when there is nothing to continue."""
    if text == "-":
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise LoopedError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an argument that is not UTF-8 arrives with lone surrogates
        raise LoopedError(f"the prompt is not UTF-8 text: {error.reason} at character {error.start}") from error
    if not text.strip():
        raise LoopedError("the prompt is empty; give a text, or - and a text on standard input")
    return text


def sampling(options: Options) -> SamplingParams:
    """Parameters of the one request. Raises `LoopedError` for values out of range."""
    from looped.infer import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        stop=() if options.stop is None else options.stop,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        min_tokens=options.min_tokens,
    )


def build(options: Options) -> LLM:
    """The model and an engine for one sequence."""
    from looped.infer import LLM
    from looped.infer.options import EngineOptions
    from looped.model import load

    EngineOptions(mode=options.mode, kv=options.kv).check()  # before minutes of loading
    model = load(options.model, device=options.device, dtype=options.dtype, max_loops=options.max_loops)
    return LLM(
        model,
        mode=options.mode,
        kv=options.kv,
        gate=pick_gate(options.gate, model),
        threshold=options.threshold,
        min_depth=options.min_depth,
        depth=options.depth,
        max_num_seqs=1,
    )


def generate(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> Iterator[Output]:
    """The outputs of one request as the engine makes them."""
    from looped.infer import Request

    llm.engine.add(Request("generate", tuple(prompt_ids), params))
    while llm.engine.has_work:
        yield from llm.engine.step()


class Writer:
    """Writes text as it comes and keeps what came."""

    def __init__(self, stream: TextIO, max_depth: int, color: bool) -> None:
        self._stream, self._max_depth, self._color = stream, max_depth, color
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._depths: list[int] = []
        self._waiting = 0
        self._finish_reason = "error"

    def take(self, output: Output) -> None:
        """Write the text of a token. A character of several tokens takes the colour of the deepest."""
        if output.token is None:
            raise LoopedError("the model's logits are not finite; the checkpoint may be damaged, or dtype too narrow")
        self._token_ids.append(output.token)
        self._depths.append(output.depth)
        self._finish_reason = output.finish_reason or self._finish_reason
        self._waiting = max(self._waiting, output.depth)
        if output.text:
            text = ansi(output.text, self._waiting, self._max_depth) if self._color else output.text
            self._stream.write(text)
            self._stream.flush()
            self._pieces.append(output.text)
            self._waiting = 0

    def result(self) -> Generated:
        decoded = self._depths[1:]
        mean = sum(decoded) / len(decoded) if decoded else None
        return Generated("".join(self._pieces), self._token_ids, self._depths, mean, self._finish_reason)


def colored(wanted: bool, stream: TextIO) -> bool:
    """Colours go to terminals only, and not where NO_COLOR is set (no-color.org)."""
    return wanted and stream.isatty() and not os.environ.get("NO_COLOR")


def legend(result: Generated, max_depth: int, seconds: float, color: bool) -> str:
    """The last line: which colour is which depth, how many tokens left there, the mean, the speed."""
    counts = depth_counts(result.depths[1:])
    mean = "no decode tokens" if result.mean_depth is None else f"mean {result.mean_depth:.2f} of {max_depth}"
    speed = f"{len(result.token_ids) / seconds:.0f} tok/s" if seconds > 0 else ""
    parts = (mean, f"{len(result.token_ids)} tokens", speed, f"ended by {result.finish_reason}")
    return f"depth  {histogram(counts, max_depth, color)}  | {', '.join(filter(None, parts))}"
