"""How fast a distillation runs: tokens and FLOPs of the teacher by the second, memory, and a run of a few steps."""

# N tokens, R loop steps, D width

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from looped.analysis.device import product_flops, wait
from looped.config import ModelConfig
from looped.train.peak import peak_flops

if TYPE_CHECKING:
    from looped.train.gates.documents import Documents
    from looped.train.gates.teaching import Teaching

_WARM_STEPS = 2
_MOST_STEPS, _MOST_SECONDS = 10, 30.0


def teacher_flops(config: ModelConfig, cuts: tuple[int, ...], readings: int) -> float:
    """FLOPs of the teacher over stretches that end at `cuts` and of the head for `readings` tokens.

    Two for each parameter and use; four for each query, key and dimension of causal attention.
    """
    number = cuts[-1]
    pairs = sum(length * (length + 1) / 2 for length in (end - begin for begin, end in itertools.pairwise(cuts)))
    outside = config.num_prelude_layers
    params = outside * config.layer_params + config.max_loops * config.core_params
    layers = outside + config.max_loops * config.num_core_layers
    attention = 4.0 * layers * config.num_heads * config.head_dim * pairs
    return 2.0 * number * params + attention + 2.0 * readings * config.vocab_size * config.hidden_size


class Meter:
    """Counts what a teacher has read since the last look, and says how fast that was."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.tokens, self.flops, self.since = 0, 0.0, time.monotonic()

    def count(self, tokens: int, cuts: tuple[int, ...], readings: int) -> None:
        """A batch of `tokens` in stretches, with padding, that end at `cuts`, and `readings` of the head."""
        self.tokens += tokens
        self.flops += teacher_flops(self.config, cuts, readings)

    def look(self) -> str:
        """Tokens a second, on a GPU the share of its peak and the most memory, since the last look."""
        seconds = time.monotonic() - self.since
        parts = [f"{self.tokens / seconds:,.0f} tok/s"] if self.tokens else []
        if self.device.type == "cuda" and self.tokens:
            memory = torch.cuda.max_memory_allocated(self.device) / 2**30
            parts += [f"MFU {self.flops / seconds / peak_flops(self.device)[0]:.0%}", f"{memory:.0f} GiB"]
        self.tokens, self.flops, self.since = 0, 0.0, time.monotonic()
        return ", ".join(parts)


@dataclass(frozen=True)
class Speed:
    """A few steps of a distillation, measured; FLOPs are the teacher's and those of the head where gates look at it."""

    steps: int
    batch_places: int
    filled: float
    seconds_per_step: float
    teacher_seconds: float
    tokens_per_second: float
    tflops: float
    peak_tflops: float
    peak_is: str
    product_tflops: float
    mfu: float
    share_of_product: float
    memory_gib: float
    planned_tokens: int
    planned_hours: float


def measure(teaching: Teaching, documents: Documents) -> Speed:
    """Train a few steps on the fly and throw them away."""
    from looped.train.gates.fit import Distillation, prepare

    device, plan = teaching.model.device, teaching.plan
    students = [student for student in teaching.students if student.parts]
    module = Distillation(teaching, students)
    module.lbfgs = False
    optimizer = module.configure_optimizers()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    tokens, places, reading, spent, steps, flops, begun = 0, 0, 0.0, 0.0, 0, 0.0, 0.0
    feed = iter(teaching.feed(documents))
    while steps < _WARM_STEPS + _MOST_STEPS and (steps <= _WARM_STEPS or spent < _MOST_SECONDS):
        if steps == _WARM_STEPS:
            tokens, places, reading, begun = 0, 0, 0.0, _now(device)
            teaching.meter.look()
        before = _now(device)
        batch, index = next(feed)
        features = teaching.features(batch, index)
        reading += _now(device) - before
        if steps == 0:
            prepare(students, features)
        loss = module.training_step(features, steps)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps, spent = steps + 1, _now(device) - begun if steps >= _WARM_STEPS else 0.0
        tokens, places, flops = tokens + batch.num_tokens, places + batch.tokens.numel(), teaching.meter.flops
    counted = steps - _WARM_STEPS
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    peak, peak_is = peak_flops(device)
    product = product_flops(device, torch.bfloat16) if device.type == "cuda" else peak
    return Speed(
        steps=counted,
        batch_places=places // counted,
        filled=tokens / places,
        seconds_per_step=spent / counted,
        teacher_seconds=reading / counted,
        tokens_per_second=tokens / spent,
        tflops=flops / spent / 1e12,
        peak_tflops=peak / 1e12,
        peak_is=peak_is,
        product_tflops=product / 1e12,
        mfu=flops / spent / peak,
        share_of_product=flops / spent / product,
        memory_gib=memory,
        planned_tokens=plan.tokens,
        planned_hours=plan.tokens / (tokens / spent) / 3600,
    )


def _now(device: torch.device) -> float:
    wait(device)
    return time.perf_counter()


def text(speed: Speed, teacher: str) -> str:
    """The figures for people."""
    lines = [
        f"{teacher}: {speed.steps} steps of {speed.batch_places:,} places, {speed.filled:.0%} of them tokens: "
        f"{speed.seconds_per_step:.3f} s a step, {speed.teacher_seconds:.3f} s of them the teacher",
        f"  {speed.tokens_per_second:,.0f} tokens/s, {speed.tflops:.1f} TFLOP/s: {speed.mfu:.1%} of "
        f"{speed.peak_tflops:.0f} ({speed.peak_is}), {speed.share_of_product:.1%} of the {speed.product_tflops:.0f} "
        "that a square product reaches",
    ]
    if speed.memory_gib:
        lines.append(f"  {speed.memory_gib:.1f} GiB of memory at most")
    lines.append(f"  {speed.planned_tokens:,} tokens take {speed.planned_hours:.2f} hours")
    return "\n".join(lines)


def as_json(speed: Speed, **more: Any) -> dict[str, Any]:
    """The same for programs."""
    return more | {name: round(x, 4) if isinstance(x, float) else x for name, x in vars(speed).items()}
