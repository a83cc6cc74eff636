"""Model configuration: the shape and constants of a looped LM, whatever its family."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from looped import checks
from looped.errors import LoopedError


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a looped LM: prelude, looped core, coda.

    `max_loops` is R, the number of loop steps the model is run with; `trained_loops` is what the checkpoint states.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_prelude_layers: int
    num_core_layers: int
    num_coda_layers: int
    max_loops: int
    trained_loops: int
    max_positions: int
    rope_theta: float
    norm_eps: float = 1e-6
    loop_norm: bool = True
    """The final norm runs after every loop step (released Ouro), so the head reads the state as it is."""
    injection: bool = False
    """The loop starts from a random state and an adapter mixes the prelude's output in at every step (Huginn)."""
    norm_after_sum: bool = False
    """Post-norms act on the residual sum (Huginn), not on the branch before the sum (Ouro)."""
    rope_interleaved: bool = False
    """Rotary pairs are neighbouring dimensions (Huginn), not the two halves (Ouro)."""
    qk_bias: bool = False
    exit_gate: bool = False
    """The checkpoint holds an exit gate of its own (Ouro)."""
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    exit_threshold: float = 1.0
    default_layout: str = "ragged"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "num_core_layers", "max_loops", "trained_loops", "max_positions"):
            if getattr(self, name) < 1:
                raise LoopedError(f"model config: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_prelude_layers", "num_coda_layers"):
            if getattr(self, name) < 0:
                raise LoopedError(f"model config: {name} must not be negative, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise LoopedError(
                f"model config: {self.num_heads} attention heads cannot be shared by {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise LoopedError(f"model config: head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def num_layers(self) -> int:
        return self.num_prelude_layers + self.num_core_layers + self.num_coda_layers

    @property
    def core_layers(self) -> range:
        """Layer indices of the core, counting prelude, core, coda."""
        return range(self.num_prelude_layers, self.num_prelude_layers + self.num_core_layers)

    @property
    def fully_looped(self) -> bool:
        """No transformer layer outside the core (`0-n-0`)."""
        return self.num_prelude_layers + self.num_coda_layers == 0

    @property
    def layer_params(self) -> int:
        d, k = self.hidden_size, self.head_dim
        attention = d * k * (self.num_heads + 2 * self.num_kv_heads) + d * k * self.num_heads
        bias = (self.num_heads + self.num_kv_heads) * k if self.qk_bias else 0
        return attention + bias + 3 * d * self.intermediate_size + 4 * d

    @property
    def core_params(self) -> int:
        """Parameters of one core application: F_r of the speedup bound (2 FLOPs each), adapter included."""
        adapter = 2 * self.hidden_size**2 if self.injection else 0
        return self.num_core_layers * self.layer_params + adapter

    @property
    def boundary_params(self) -> int:
        """Parameters that run once a token: F_0 of the speedup bound. The embedding is a lookup and counts nothing."""
        layers = (self.num_prelude_layers + self.num_coda_layers) * self.layer_params
        return layers + self.hidden_size + self.vocab_size * self.hidden_size

    def speedup_bound(self, mean_depth: float) -> float:
        """S_dec = (F_0 + R F_r) / (F_0 + d F_r): continuous depth batching, eq. 1."""
        return (self.boundary_params + self.max_loops * self.core_params) / (
            self.boundary_params + mean_depth * self.core_params
        )

    def kv_bytes_per_token(self, num_planes: int, dtype_bytes: int) -> int:
        """K and V bytes of one token when each core layer keeps `num_planes` planes."""
        layers = self.num_prelude_layers + self.num_coda_layers + self.num_core_layers * num_planes
        return 2 * layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def with_loops(self, max_loops: int | None) -> ModelConfig:
        """The same model run with R = `max_loops`."""
        if max_loops is None:
            return self
        checks.whole_numbers(max_loops=max_loops)
        if max_loops < 1:
            raise LoopedError(f"max_loops must be at least 1, got {max_loops}")
        return dataclasses.replace(self, max_loops=max_loops)
