"""The least time a stage can take: its bytes over the memory's bandwidth, or its FLOPs over the multipliers' peak.

Weights count once a launch, K/V once a row, activations nothing. Multiplications count twice their weights, attention
4 H K for each key a row reads. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from looped.config import ModelConfig


class Ceilings(NamedTuple):
    """What a device was measured to reach: bytes a second, FLOPs a second."""

    bytes_s: float
    flops_s: float


class Work(NamedTuple):
    """What a launch must move and multiply."""

    num_bytes: float
    flops: float

    def __add__(self, other: object) -> Work:
        if not isinstance(other, Work):
            return NotImplemented
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def times(self, count: float) -> Work:
        return Work(self.num_bytes * count, self.flops * count)

    def floor(self, ceilings: Ceilings) -> float:
        """Seconds, whichever of the two takes longer."""
        return max(self.num_bytes / ceilings.bytes_s, self.flops / ceilings.flops_s)


@dataclass(frozen=True)
class Demand:
    """The work of each stage of a model whose weights and K/V have `itemsize` bytes a number."""

    config: ModelConfig
    itemsize: int

    def _layers(self, num: int, rows: float, keys: float, new: float) -> Work:
        """`num` layers over `rows` rows that read `keys` keys in all and write `new` of them."""
        config = self.config
        params = num * config.layer_params
        kv = 2 * num * config.num_kv_heads * config.head_dim * self.itemsize
        attention = 4 * num * config.num_heads * config.head_dim * keys
        return Work(params * self.itemsize + kv * (keys + new), 2 * params * rows + attention)

    def core(self, rows: int, context: float) -> Work:
        """One loop step of `rows` rows with `context` keys each, their own included."""
        adapter = 2 * self.config.hidden_size**2 if self.config.injection else 0
        mixing = Work(adapter * self.itemsize, 2 * adapter * rows)
        return self._layers(self.config.num_core_layers, rows, rows * context, 0) + mixing

    def prelude(self, rows: int, context: float) -> Work:
        """The embedding's rows, and the layers before the core."""
        looked_up = Work(rows * self.config.hidden_size * self.itemsize, 0)
        return self._layers(self.config.num_prelude_layers, rows, rows * context, 0) + looked_up

    def coda(self, rows: int, context: float) -> Work:
        """The layers after the core, and the head."""
        head = self.config.vocab_size * self.config.hidden_size
        last = Work(head * self.itemsize, 2 * head * rows)
        return self._layers(self.config.num_coda_layers, rows, rows * context, 0) + last

    def decode(self, rows: int, context: float, depth: int) -> Work:
        """One token of each row at `depth` loops."""
        core = self.core(rows, context).times(depth)
        return self.prelude(rows, context) + core + self.coda(rows, context)

    def prefill(self, tokens: int, depth: int) -> Work:
        """A prompt of `tokens` tokens at `depth` loops, all at once; its head sees the last token only."""
        config = self.config
        adapter = 2 * config.hidden_size**2 if config.injection else 0
        keys = tokens * (tokens + 1) / 2

        def part(num: int) -> Work:
            done = self._layers(num, tokens, keys, 0)
            params = num * config.layer_params * self.itemsize
            kv = 2 * num * config.num_kv_heads * config.head_dim * self.itemsize * tokens
            return Work(params + kv, done.flops)  # a tile of queries shares the keys it reads

        core = part(config.num_core_layers) + Work(adapter * self.itemsize, 2 * adapter * tokens)
        outer = part(config.num_prelude_layers) + part(config.num_coda_layers)
        head = config.vocab_size * config.hidden_size
        return core.times(depth) + outer + Work(head * self.itemsize, 2 * head)
