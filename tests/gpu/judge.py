"""Whether an engine's tokens and depths are the reference decoder's, up to a margin.

Kernels add in other orders than the reference, so a token may differ where two logits are nearly equal, and a depth
where a gate is nearly at its threshold. The judge replays the engine's own tokens and depths through the reference, so
that every token is judged on the same past: the token's logit may be below the largest by at most the margin, and
every decision of the gate must be the one that the threshold, moved up or down by the margin, would give.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from looped.decode import _Decoder, resolve_policy
from looped.gates import Entry, Gate, Params


class Margin(NamedTuple):
    """Differences that do not count: between logits, and between a gate's value and its threshold."""

    logits: float
    gate: float


# Micro models have logits of a few units; half precision rounds them, and the states gates look at, to about 1 %.
MARGINS = {
    torch.float32: Margin(1e-3, 1e-4),
    torch.float16: Margin(0.06, 0.01),
    torch.bfloat16: Margin(0.4, 0.06),
}


@dataclass
class Verdict:
    """`wrong` says what no margin excuses; `excused` counts tokens and exits that differ within it, of `judged`."""

    judged: int = 0
    excused: int = 0
    worst: float = 0.0
    """Largest shortfall of a chosen token's logit."""
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Verdict") -> None:
        self.judged += other.judged
        self.excused += other.excused
        self.worst = max(self.worst, other.worst)
        self.wrong += other.wrong


class ForcedGate(Gate):
    """Leaves at the depths it is told, and asks the real gate, at both ends of the margin, whether that may be."""

    kind = "forced"

    def __init__(self, inner: Gate, margin: float, max_depth: int, verdict: Verdict) -> None:
        self.inner, self.margin, self.max_depth, self.verdict = inner, margin, max_depth, verdict
        self.latency, self.uses_carry, self.min_depth = inner.latency, inner.uses_carry, inner.min_depth
        self.needs_logits = inner.needs_logits
        self.depth = 0

    def _ask(self, decide: Any, params: Params, states: tuple[Any, ...], exits_at: int) -> tuple[Any, torch.Tensor]:
        """The next states at exact, lower and higher threshold; the decision about leaving at `exits_at`."""
        moved = [params._replace(threshold=params.threshold + shift) for shift in (0, -self.margin, self.margin)]
        answers = [decide(state, at) for state, at in zip(states, moved, strict=True)]
        forced = self.depth == exits_at
        if 1 <= exits_at < self.max_depth and exits_at <= self.depth:
            exact, low, high = (bool(decision) for _, decision in answers)
            self.verdict.judged += 1
            self.verdict.excused += forced != exact
            if forced not in (exact, low, high):
                self.verdict.wrong.append(f"depth {self.depth} against the gate's decision {exact} about {exits_at}")
        return tuple(state for state, _ in answers), torch.full_like(answers[0][1], forced)

    def start(self, entry: Entry, params: Params) -> tuple[Any, torch.Tensor]:
        def decide(_: Any, at: Params) -> Any:
            return self.inner.start(entry, at)

        return self._ask(decide, params, (None,) * 3, 1 if self.latency else 0)

    def step(self, state: Any, z: torch.Tensor, step: torch.Tensor, params: Params) -> tuple[Any, torch.Tensor]:
        def decide(inner: Any, at: Params) -> Any:
            return self.inner.step(inner, z, step, at)

        return self._ask(decide, params, state, int(step[0]) + self.latency)


@torch.no_grad()
def judge(model, prompt, token_ids, depths, margin: Margin, chunk_size=None, **policy) -> Verdict:
    """Judge one greedy sequence. `policy` is `layout`, `gate`, `threshold` and what else `resolve_policy` takes."""
    verdict = Verdict()
    resolved = resolve_policy(model, **policy)
    forced = None
    if resolved.gate is not None:
        forced = ForcedGate(resolved.gate, margin.gate, resolved.max_depth, verdict)
    decoder = _Decoder(model, replace(resolved, gate=forced), len(prompt) + len(token_ids), 0, None)
    size = chunk_size or len(prompt)
    for start in range(0, len(prompt), size):
        trip, logits = decoder.prompt_chunk(list(prompt[start : start + size]), start, len(prompt))
    for index, (token, depth) in enumerate(zip(token_ids, depths, strict=True)):
        if int(trip.depths[-1]) != depth:
            verdict.wrong.append(f"token {index}: depth {depth} against {int(trip.depths[-1])}")
        shortfall = float(logits[0].max() - logits[0, token])
        verdict.judged += 1
        verdict.excused += shortfall > 0
        verdict.worst = max(verdict.worst, shortfall)
        if not shortfall <= margin.logits:
            verdict.wrong.append(f"token {index}: {token} is {shortfall:.3g} below {int(logits[0].argmax())}")
        if resolved.gate is not None and resolved.gate.uses_carry:
            chosen = torch.tensor([token], device=model.device)
            decoder.carry = resolved.gate.finish(model.readout(trip.exit_h[-1:]), logits, chosen, trip.depths[-1:])
        if index + 1 < len(token_ids):
            if forced is not None:
                forced.depth = depths[index + 1]
            trip, logits = decoder.decode_token(token, len(prompt) + index, index + 1)
    return verdict
