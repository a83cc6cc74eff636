"""The reference decoder: one sequence, no batching, no cleverness. The engine's output must equal it.

A pass feeds one token (or one chunk of the prompt) through prelude, loop steps and coda. A KV layout says which plane a
step writes and reads; a gate says after which step a token leaves.
"""

# N tokens of a pass, T cached positions, D width, H heads, G key/value heads, K head dimension, V vocabulary

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from looped import checks
from looped.errors import LoopedError, shown, unknown
from looped.gates import Carry, Entry, Gate, Params, get_gate
from looped.kv import KVLayout, get_layout
from looped.model import LoopedLM
from looped.model.attention import Attend
from looped.sampling import Alone, Drawn, end_ids
from looped.sampling_options import Sampling


@dataclass(frozen=True)
class PrefillSchedule:
    """Thresholds of a ragged prefill: constant, or falling by a cosine from 1 at the prompt's start to `threshold`.

    The first `protected` tokens run at full depth (ragged KV, appendix E). With `block` the tokens of a chunk leave
    together, as in Huginn's official code: `looped.generate` alone, with a training-free criterion, does that.
    """

    threshold: float
    cosine: bool = False
    protected: int = 0
    block: bool = False

    def __post_init__(self) -> None:
        if self.block and (self.cosine or self.protected):
            raise LoopedError("a prompt that leaves as one block has one threshold and no protected tokens")

    def thresholds(self, positions: Tensor, prompt_len: int) -> Tensor:
        """The threshold at each position of a prompt: [N] to [N]."""
        flat = torch.full(positions.shape, float(self.threshold), dtype=torch.float64, device=positions.device)
        if not self.cosine:
            return flat
        turn = positions.double() * (math.pi / max(prompt_len - 1, 1))
        return flat + (1 - flat) * (1 + turn.cos()) / 2


@dataclass(frozen=True)
class Generation:
    """New tokens of one sequence; `depths[i]` is the number of loops of the pass that produced token i.

    Where logprobs were asked for, `logprobs[i]` is token i's and `top_logprobs[i]` has those of the likeliest tokens
    as (id, log-probability), best first.
    """

    token_ids: list[int]
    depths: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None


@dataclass(frozen=True)
class DecodePolicy:
    """How deep tokens go and where their K/V lie, with every default resolved and checked against the model."""

    layout: KVLayout
    max_depth: int
    gate: Gate | None
    threshold: float
    min_depth: int
    dense_compute: bool
    prefill: PrefillSchedule | None
    """None: the prompt runs at full depth."""


def resolve_policy(
    model: LoopedLM,
    layout: str | KVLayout | None = None,
    gate: str | Path | Gate | None = None,
    threshold: float | None = None,
    min_depth: int | None = None,
    depth: int | None = None,
    compute: str = "sparse",
    prefill: str = "dense",
    prefill_threshold: float | PrefillSchedule | None = None,
) -> DecodePolicy:
    """Check the options of a decode and fill in their defaults; the engine uses the same rules.

    Raises `LoopedError` for a value outside its range and for options that contradict each other.
    """
    checks.whole_numbers(depth=depth, min_depth=min_depth)
    checks.numbers(threshold=threshold)
    if not isinstance(prefill_threshold, PrefillSchedule):
        checks.numbers(prefill_threshold=prefill_threshold)
    if compute not in ("sparse", "dense"):
        raise unknown("compute", compute, ("sparse", "dense"))
    if prefill not in ("dense", "ragged"):
        raise unknown("prefill", prefill, ("dense", "ragged"))
    kv = get_layout(model.config.default_layout if layout is None else layout)
    max_depth = model.check_depth(depth)
    if gate is None:
        if threshold is not None or min_depth is not None or prefill == "ragged" or prefill_threshold is not None:
            raise LoopedError("threshold, min_depth and a ragged prefill need a gate")
        return DecodePolicy(kv, max_depth, None, 1.0, 1, compute == "dense" or kv.needs_dense, None)
    bound = get_gate(gate, model)
    bound.check_layout(kv.name, prefill)
    chosen = bound.check_threshold(bound.default_threshold(model.config) if threshold is None else threshold)
    floor = bound.min_depth if min_depth is None else min_depth
    if floor < 1 or (min_depth is not None and min_depth > model.config.max_loops):
        raise LoopedError(f"min_depth must be between 1 and {model.config.max_loops}, got {shown(floor)}")
    schedule = None
    if prefill == "ragged":
        if bound.uses_carry:
            raise LoopedError(f"the {bound.name} gate needs the token before, so it cannot run in a ragged prefill")
        given = prefill_threshold if prefill_threshold is not None else chosen
        schedule = given if isinstance(given, PrefillSchedule) else PrefillSchedule(given)
        bound.check_threshold(schedule.threshold)
        if schedule.block:
            bound.as_block()  # refuses where it cannot
        elif bound.needs_logits and model.config.num_coda_layers:
            # Coda layers would read states of tokens that are still in the loop, other ones if the prompt were cut.
            raise LoopedError(
                f"the {bound.name} gate looks at logits, and those of a prompt token depend on where the tokens before "
                f"it stand in the coda layers of {model.name}: it cannot run in a ragged prefill"
            )
        if bound.decode_only:
            schedule = None
    elif prefill_threshold is not None:
        raise LoopedError("prefill_threshold needs prefill='ragged'")
    return DecodePolicy(kv, max_depth, bound, chosen, floor, compute == "dense" or kv.needs_dense, schedule)


def check_prompt(model: LoopedLM, prompt_ids: Sequence[int]) -> list[int]:
    """The prompt as a list, refused when empty, too long for the context, or with ids outside the vocabulary."""
    prompt = checks.token_ids("the prompt", prompt_ids)
    context, vocab = model.config.max_positions, model.config.vocab_size
    if not prompt:
        raise LoopedError("the prompt is empty; give at least one token")
    if len(prompt) >= context:
        raise LoopedError(
            f"the prompt has {len(prompt)} tokens; the context of {context} leaves room for {context - 1}"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise LoopedError(f"prompt token ids must be between 0 and {vocab - 1}")
    return prompt


class Cache:
    """K and V of one sequence: planes in the core layers, one plane in the layers outside it."""

    def __init__(self, model: LoopedLM, layout: KVLayout, max_depth: int, capacity: int) -> None:
        config = model.config
        self.layout, self.max_depth = layout, max_depth
        self.core = config.core_layers
        planes = layout.num_planes(max_depth)
        shape = (2, capacity, config.num_kv_heads, config.head_dim)
        self.kv = [
            model.embed.weight.new_zeros((planes if layer in self.core else 1, *shape))
            for layer in range(config.num_layers)
        ]

    def attend(self, positions: Tensor, step: int | None = None) -> Attend:
        """Attention of consecutive or scattered `positions` [N]: write their K/V, read all positions up to each.

        `step` is the loop step inside the core, None in prelude and coda.
        """
        plane = 0 if step is None else self.layout.write_plane(step)
        end = int(positions[-1]) + 1
        mask = torch.arange(end, device=positions.device)[None] <= positions[:, None]

        def run(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            k_TGK, v_TGK = self.kv[layer][plane]
            k_TGK[positions], v_TGK[positions] = k_NGK, v_NGK
            q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_TGK[:end], v_TGK[:end]))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            return out[0].transpose(0, 1)

        return run

    def fill_missing(self, positions: Tensor, exit_depth: int) -> None:
        """Planes that tokens leaving after `exit_depth` loops never wrote."""
        for plane, source in self.layout.missing_planes(exit_depth, self.max_depth):
            for layer in self.core:
                self.kv[layer][plane][:, positions] = self.kv[layer][source][:, positions]


@dataclass
class _Pass:
    """One trip of N tokens through the model: their exits and the states they left with."""

    h: Tensor
    injection: Tensor | None
    exit_h: Tensor = field(init=False)
    depths: Tensor = field(init=False)
    exited: Tensor = field(init=False)
    logits: Tensor | None = None
    """[N, V] after the last step that each token ran, for gates that look at them."""

    def __post_init__(self) -> None:
        self.exit_h = self.h.clone()
        self.depths = torch.zeros(self.h.shape[0], dtype=torch.long, device=self.h.device)
        self.exited = torch.zeros(self.h.shape[0], dtype=torch.bool, device=self.h.device)


class _Decoder:
    """The state of one generation."""

    def __init__(self, model: LoopedLM, policy: DecodePolicy, capacity: int, seed: int, state: str | None) -> None:
        self.model, self.policy, self.seed, self.state = model, policy, seed, state
        self.cache = Cache(model, policy.layout, policy.max_depth, capacity)
        self.carry: Carry | None = None

    def run(self, tokens: list[int], start: int, gate: Gate | None, params: Params, index: int) -> _Pass:
        """Prelude and loop steps of `tokens` at positions start.. ; without a gate all of them run R loops."""
        model, device = self.model, self.model.device
        positions = torch.arange(start, start + len(tokens), device=device)
        seeds = torch.full_like(positions, self.seed)
        state = model.init_state(seeds, positions, self.state)
        h, injection = model.prelude(
            torch.tensor(tokens, device=device), positions, self.cache.attend(positions), state
        )
        trip = _Pass(h, injection)
        ahead = torch.zeros_like(trip.exited)
        gate_state: tuple[Tensor, ...] = ()
        if gate is not None:
            entry = Entry(
                model.readout(h), injection, self.carry, torch.zeros_like(positions), torch.full_like(positions, index)
            )
            gate_state, ahead = gate.start(entry, params)
        for step in range(1, self.policy.max_depth + 1):
            active = torch.ones_like(trip.exited) if self.policy.dense_compute else ~trip.exited
            rows = active.nonzero()[:, 0]
            stepped = model.core(
                trip.h[rows],
                None if injection is None else injection[rows],
                positions[rows],
                step,
                self.cache.attend(positions[rows], step),
            )
            trip.h = trip.h.index_copy(0, rows, stepped)  # a new tensor: the gate may hold on to the last one
            leaving = ahead
            if gate is not None:
                steps = torch.full_like(positions, step)
                gate_state, ahead = gate.step(gate_state, self._seen(gate, trip, rows, positions), steps, params)
                leaving = ahead if gate.latency == 0 else leaving
            leaving = (leaving | (step >= params.max_depth)) & ~trip.exited
            self._leave(trip, leaving, positions, step)
            if bool(trip.exited.all()) and not self.policy.dense_compute:
                break
        return trip

    def _seen(self, gate: Gate, trip: _Pass, rows: Tensor, positions: Tensor) -> Tensor:
        """What the gate looks at after a step of `rows`: readouts [N, D], or the coda's logits [N, V]."""
        if not gate.needs_logits:
            return self.model.readout(trip.h)
        at = positions[rows]
        logits = self.model.coda(trip.h[rows], at, self.cache.attend(at))
        # Rows that left keep the logits they left with; nobody looks at them.
        trip.logits = logits if trip.logits is None else trip.logits.index_copy(0, rows, logits)
        return trip.logits

    def _leave(self, trip: _Pass, leaving: Tensor, positions: Tensor, step: int) -> None:
        trip.exit_h[leaving] = trip.h[leaving]
        trip.depths[leaving] = step
        trip.exited |= leaving
        if not self.policy.dense_compute:
            self.cache.fill_missing(positions[leaving], step)

    def params(self, n: int, threshold: Tensor | float, min_depth: int) -> Params:
        ones = torch.ones(n, dtype=torch.long, device=self.model.device)
        thresholds = torch.as_tensor(threshold, dtype=torch.float64, device=ones.device).expand(n)
        return Params(thresholds, min_depth * ones, self.policy.max_depth * ones)

    def prompt_chunk(self, tokens: list[int], start: int, prompt_len: int) -> tuple[_Pass, Tensor]:
        """A chunk of the prompt: its pass and the logits of its last token [1, V]."""
        policy = self.policy
        positions = torch.arange(start, start + len(tokens), device=self.model.device)
        gate, params = None, self.params(len(tokens), 1.0, 1)
        if policy.prefill is not None:
            assert policy.gate is not None
            gate = policy.gate.as_block() if policy.prefill.block else policy.gate
            params = self.params(len(tokens), policy.prefill.thresholds(positions, prompt_len), policy.min_depth)
            protected = torch.where(positions < policy.prefill.protected, policy.max_depth, params.min_depth)
            params = params._replace(min_depth=protected)
        trip = self.run(tokens, start, gate, params, index=0)
        last = torch.tensor([len(tokens) - 1], device=self.model.device)
        return trip, self.model.coda(trip.exit_h, positions, self.cache.attend(positions), rows=last)

    def decode_token(self, token: int, position: int, index: int) -> tuple[_Pass, Tensor]:
        """One token at `position`: its pass and logits [1, V]."""
        params = self.params(1, self.policy.threshold, self.policy.min_depth)
        trip = self.run([token], position, self.policy.gate, params, index)
        at = torch.tensor([position], device=self.model.device)
        return trip, self.model.coda(trip.exit_h, at, self.cache.attend(at))

    def choose(self, logits: Tensor, trip: _Pass, sampler: Alone) -> Drawn:
        """Draw the next token and leave the carry for its own pass."""
        drawn = sampler.draw(logits)
        gate = self.policy.gate
        if gate is not None and gate.uses_carry:
            readout = self.model.readout(trip.exit_h[-1:])
            self.carry = gate.finish(readout, logits, drawn.tokens, trip.depths[-1:])
        return drawn


@torch.no_grad()
def generate(
    model: LoopedLM,
    prompt_ids: Sequence[int],
    layout: str | KVLayout | None = None,
    gate: str | Path | Gate | None = None,
    threshold: float | None = None,
    min_depth: int | None = None,
    depth: int | None = None,
    compute: str = "sparse",
    prefill: str = "dense",
    prefill_threshold: float | PrefillSchedule | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    chunk_size: int | None = None,
    state: str | None = None,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> Generation:
    """Generate after one prompt, the plain way.

    `layout` None is the model's default, `gate` None is full depth. `depth` lowers R for prompt and decode alike.
    `compute="dense"` runs and stores all R loops, and the gate only picks the output (the official Ouro behaviour).
    `prefill="ragged"` lets prompt tokens exit, at `prefill_threshold`. `chunk_size` None takes the prompt in one chunk.
    Random numbers come from (seed, position). `sampling` says all that decides a token (`SamplingParams.sampling` is
    one), `temperature` alone is short for it. An EOS token, unless ignored, or one of its `stop_token_ids` ends the
    sequence and is part of `token_ids`.

    Raises `LoopedError` for an unknown name, a value out of range, or a prompt longer than the context.
    """
    if not isinstance(model, LoopedLM):
        raise LoopedError(f"generate takes a loaded model, got {model!r}; load it with looped.load")
    checks.given(max_new_tokens=max_new_tokens, seed=seed)
    checks.whole_numbers(max_new_tokens=max_new_tokens, chunk_size=chunk_size, seed=seed)
    policy = resolve_policy(model, layout, gate, threshold, min_depth, depth, compute, prefill, prefill_threshold)
    prompt = check_prompt(model, prompt_ids)
    if chunk_size is not None and chunk_size < 1:
        raise LoopedError(f"chunk_size must be at least 1, got {chunk_size}")
    if max_new_tokens < 1:
        raise LoopedError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not -(1 << 63) <= seed < 1 << 63:
        raise LoopedError(f"seed must fit in 64 bits, got {seed}")
    if sampling is not None and temperature != 0:
        raise LoopedError("give the temperature in sampling, not beside it")
    params = Sampling(temperature=temperature) if sampling is None else sampling
    vocab_size = model.config.vocab_size
    params.check_vocab(vocab_size)
    total = min(len(prompt) + max_new_tokens, model.config.max_positions)
    decoder = _Decoder(model, policy, total, seed, state)
    sampler = Alone(params, seed, end_ids(params, model.config.eos_ids, ignore_eos, vocab_size), prompt, vocab_size)
    size = chunk_size or len(prompt)
    for start in range(0, len(prompt), size):
        trip, logits = decoder.prompt_chunk(prompt[start : start + size], start, len(prompt))
    draws: list[Drawn] = []
    token_ids, depths, reason = [], [], "length"
    for position in range(len(prompt), total):
        draws.append(decoder.choose(logits, trip, sampler))
        token_ids.append(int(draws[-1].tokens))
        depths.append(int(trip.depths[-1]))
        if sampler.ended:
            reason = "stop"
            break
        if position + 1 < total:
            trip, logits = decoder.decode_token(token_ids[-1], position, len(token_ids))
    return Generation(token_ids, depths, reason, *_logprobs(draws, params.logprobs))


def _logprobs(
    draws: list[Drawn], count: int | None
) -> tuple[list[float] | None, list[tuple[tuple[int, float], ...]] | None]:
    """Log-probabilities of tokens and of the `count` likeliest ones each; None where they were not asked for."""
    if count is None:
        return None, None
    own: list[float] = []
    top: list[tuple[tuple[int, float], ...]] = []
    for drawn in draws:
        assert drawn.logprob is not None and drawn.top_ids is not None and drawn.top_logprobs is not None
        own.append(float(drawn.logprob))
        ids, values = drawn.top_ids[0, :count].tolist(), drawn.top_logprobs[0, :count].tolist()
        top.append(tuple(zip(ids, values, strict=True)))
    return own, top
