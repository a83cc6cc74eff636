"""THE model: prelude, looped core, readout, coda. Training, the reference decoder and the engine all run this code."""

# B rows, T tokens, D width, V vocabulary; leading dimensions [...] are free

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from looped import checks, rng
from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.model import ops
from looped.model.attention import Attend, dense_causal
from looped.model.layers import Block, RMSNorm, rotary, run_blocks
from looped.model.tokenizer import Tokenizer

# Scale of the initial state: init std times embedding scale in the official code.
_STATE_STD = math.sqrt(2 / 5)


class LoopedLM(nn.Module):
    """A looped language model. Every stage is a pure function of its inputs and the weights.

    `attend(layer, q, k, v)` is given by the caller: dense causal in training, a cache in the reference decoder, pages
    in the engine. A new instance has random weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.name = config.family
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.prelude_blocks = nn.ModuleList(Block(config) for _ in range(config.num_prelude_layers))
        self.core_blocks = nn.ModuleList(Block(config) for _ in range(config.num_core_layers))
        self.coda_blocks = nn.ModuleList(Block(config) for _ in range(config.num_coda_layers))
        width = config.hidden_size
        self.adapter = nn.Linear(2 * width, width, bias=False) if config.injection else None
        self.norm = RMSNorm(width, config.norm_eps)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.exit_gate = nn.Linear(width, 1) if config.exit_gate else None
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self._load_tokenizer: Callable[[], Tokenizer | None] = lambda: None
        self._tokenizer: Tokenizer | None = None
        self._revision: str | None = None
        self.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, read on first use; None when the folder has none."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    @property
    def revision(self) -> str:
        """SHA-256 of the weights rounded to bfloat16: the same for every dtype a checkpoint is stored or loaded in."""
        if self._revision is None:
            digest = hashlib.sha256()
            for name, value in sorted(self.state_dict().items()):
                digest.update(name.encode())
                digest.update(value.to(torch.bfloat16).contiguous().view(torch.uint8).cpu().numpy().tobytes())
            self._revision = digest.hexdigest()
        return self._revision

    def init_state(self, seeds: Tensor, positions: Tensor, kind: str | None = None) -> Tensor | None:
        """What the loop starts from at each position: [...] seeds and positions to [..., D].

        None for families whose loop starts from the prelude's output. `kind` is "zeros", or None for the noise of
        (seed, position): a truncated normal of scale sqrt(2/5) cut at three of them.
        """
        if kind not in (None, "zeros"):
            raise LoopedError(f"state must be 'zeros' or left out, got {kind!r}")
        if not self.config.injection:
            return None
        if kind == "zeros":
            return torch.zeros(*positions.shape, self.config.hidden_size, device=self.device, dtype=self.dtype)
        width = self.config.hidden_size
        return rng.truncated_normal(seeds, positions, rng.INITIAL_STATE, width, _STATE_STD, self.dtype)

    def prelude(
        self, tokens: Tensor, positions: Tensor, attend: Attend, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Embedding and the first unshared layers: tokens [...] to (h [..., D], injection [..., D] or None)."""
        x = self.embed(tokens)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.prelude_blocks:
            rope = rotary(positions, self.config, x.dtype)
            x = run_blocks(self.prelude_blocks, x, rope, 0, attend)
        return (x, None) if state is None else (state.to(x.dtype), x)

    def core(
        self, h: Tensor, injection: Tensor | None, positions: Tensor, step: Tensor | int, attend: Attend
    ) -> Tensor:
        """One loop step: h [..., D] to h [..., D]. `step` (from 1) is for families whose core depends on it."""
        normed = None
        if self.adapter is not None:
            first = next(self.core_blocks.children())
            assert isinstance(first, Block)
            injection = h if injection is None else injection
            h, normed = ops.joined(h, injection, self.adapter.weight, first.norm_1.op)
        rope = rotary(positions, self.config, h.dtype)
        final = self.norm if self.config.loop_norm else None
        return run_blocks(self.core_blocks, h, rope, self.config.num_prelude_layers, attend, final, normed)

    def readout(self, h: Tensor) -> Tensor:
        """What a gate sees of the state h [..., D]: Ouro's final norm of it, Huginn's state as it is."""
        if self.config.loop_norm or self.config.injection:
            return h
        return self._final_norm(h)

    def coda(self, h: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """The last unshared layers, final norm and LM head: h [..., D] to logits [..., V].

        `rows` picks, after the layers, the rows of h [N, D] whose logits are wanted: a prompt's last tokens.
        """
        return self.logits_of(self.coda_state(h, positions, attend, rows))

    def coda_state(self, h: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """The coda up to its LM head: what `logits_of` makes logits of."""
        if self.config.injection:
            h = self.norm(h)
        if self.coda_blocks:
            rope = rotary(positions, self.config, h.dtype)
            h = run_blocks(self.coda_blocks, h, rope, self.config.core_layers.stop, attend)
        if rows is not None:
            h = h[rows]
        if self.coda_blocks or not self.config.loop_norm:
            h = self.norm(h)
        return h

    def logits_of(self, h: Tensor) -> Tensor:
        """The LM head alone: [..., D] to logits [..., V]."""
        return ops.head(h, self.head.weight)

    def likeliest(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row by `logits_of` h [N, D], and whether its logit is a finite number: [N]."""
        return ops.head_largest(h, self.head.weight)

    def _final_norm(self, h: Tensor) -> Tensor:
        normed: Tensor = self.norm(h)
        return normed

    def check_depth(self, depth: int | None) -> int:
        """R, or the wanted `depth` after checking that 1 <= depth <= R."""
        if depth is None:
            return self.config.max_loops
        checks.whole_numbers(depth=depth)
        if not 1 <= depth <= self.config.max_loops:
            raise LoopedError(f"depth must be between 1 and max_loops = {self.config.max_loops}, got {depth}")
        return depth

    def states(self, input_ids: Tensor, depth: int | None = None, state: Tensor | str | None = None) -> list[Tensor]:
        """Readouts z_1..z_depth, each [B, T, D], of full sequences [B, T] without a cache."""
        return [self.readout(h) for h in self._run(input_ids, self.check_depth(depth), state)]

    def logits(self, input_ids: Tensor, depth: int | None = None, state: Tensor | str | None = None) -> Tensor:
        """Logits [B, T, V] of full sequences [B, T] after `depth` loop steps, without a cache.

        `state` is what Huginn starts from: "zeros", a tensor [B, T, D], or None for the noise of seed 0.
        """
        self._check_ids(input_ids)
        h = self._run(input_ids, self.check_depth(depth), state)[-1]
        return self.coda(h, torch.arange(input_ids.shape[-1], device=input_ids.device), dense_causal)

    def _check_ids(self, input_ids: Tensor) -> None:
        vocab = self.config.vocab_size
        if not isinstance(input_ids, Tensor) or input_ids.is_floating_point() or not input_ids.numel():
            raise LoopedError("input_ids must be a tensor of token ids [B, T] that is not empty")
        if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocab:
            raise LoopedError(f"token ids must be between 0 and {vocab - 1}")

    def _run(self, input_ids: Tensor, depth: int, state: Tensor | str | None) -> list[Tensor]:
        if input_ids.shape[-1] > self.config.max_positions:
            raise LoopedError(f"{input_ids.shape[-1]} tokens exceed the context of {self.config.max_positions}")
        positions = torch.arange(input_ids.shape[-1], device=input_ids.device)
        if not isinstance(state, Tensor):
            state = self.init_state(torch.zeros_like(input_ids), positions.expand_as(input_ids), state)
        h, injection = self.prelude(input_ids, positions, dense_causal, state)
        steps = []
        for step in range(1, depth + 1):
            h = self.core(h, injection, positions, step, dense_causal)
            steps.append(h)
        return steps
