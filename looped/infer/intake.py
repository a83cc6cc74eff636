"""From a request to a sequence the engine can run, or a sentence that says why it cannot."""

from __future__ import annotations

from looped.decode import DecodePolicy, check_prompt
from looped.errors import LoopedError, shown
from looped.infer.detokenize import Detokenizer
from looped.infer.options import EngineOptions
from looped.infer.prefix import block_hashes
from looped.infer.request import Request, SamplingParams
from looped.infer.runner import Runner
from looped.infer.sampler import Sampler
from looped.infer.scheduler import Job
from looped.infer.sequence import EngineSequence


class Intake:
    """Checks requests against a model, its policy and its memory."""

    def __init__(self, runner: Runner, policy: DecodePolicy, options: EngineOptions, promise_all: bool) -> None:
        self.runner, self.policy, self.options = runner, policy, options
        self.model, self.kv = runner.model, runner.kv
        self._promise_all = promise_all

    def sequence(self, request: Request) -> EngineSequence:
        """The sequence of a request. Raises `LoopedError` if it can never run."""
        params, gate = request.params, self.policy.gate
        self._check_depths(params)
        if gate is not None:
            gate.check_request(request.ordinal)
        prompt = check_prompt(self.model, request.prompt_ids)
        self.runner.sampler.check(params)
        max_len = min(len(prompt) + params.max_tokens, self.model.config.max_positions)
        if not self.kv.fits(max_len):
            raise LoopedError(
                f"{len(prompt)} prompt tokens and up to {max_len - len(prompt)} new ones do not fit into a KV pool of "
                f"{self.kv.capacity_tokens} tokens; lower max_tokens or raise num_pages"
            )
        job = Job(request.key, len(prompt), max_len, prefix=self._prefix(request, prompt))
        self.reserve(job)
        eos = () if params.ignore_eos else self.model.config.eos_ids
        stop_ids = frozenset((*eos, *params.stop_token_ids))
        return EngineSequence(request, prompt, job, stop_ids, self._detokenizer(request), Sampler.level(params))

    def reserve(self, job: Job) -> None:
        """How much memory admission promises: everything, unless it can be taken back."""
        most = job.max_len - 1
        job.reserve_len = most if self._promise_all else min(job.prompt_len + 1, most)

    def _prefix(self, request: Request, prompt: list[int]) -> tuple[bytes, ...]:
        """Hashes of the prompt's blocks; whatever a block's K/V depend on besides its tokens is in the salt."""
        if not self.options.prefix_caching:
            return ()
        salt: list[object] = [self.policy.layout.name, self.policy.max_depth, self.options.chunk_size]
        if self.policy.prefill is not None:
            cosine = len(prompt) if self.policy.prefill.cosine else None
            salt += [self.policy.prefill, cosine, request.params.min_depth]
        if self.model.config.injection:
            salt.append(self.runner.seed(request.params))
        return block_hashes(prompt, self.kv.prefix_block, repr(salt).encode())

    def _check_depths(self, params: SamplingParams) -> None:
        wanted = {"exit_threshold": params.exit_threshold, "min_depth": params.min_depth}
        for name, value in {**wanted, "max_depth": params.max_depth}.items():
            if value is not None and self.options.mode == "cb":
                raise LoopedError(f"{name} has no effect under mode 'cb', which runs every token at full depth")
            if value is not None and self.policy.gate is None and name in wanted:
                raise LoopedError(f"{name} was given, but the engine runs without a gate")
        if params.exit_threshold is not None and self.policy.gate is not None:
            self.policy.gate.check_threshold(params.exit_threshold)
        for name in ("min_depth", "max_depth"):
            value = getattr(params, name)
            if value is not None and value > self.policy.max_depth:
                raise LoopedError(f"{name} must be between 1 and {self.policy.max_depth} loops, got {shown(value)}")

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        params = request.params
        tokenizer = self.model.tokenizer if request.stream or params.stop else None
        if tokenizer is None:
            if params.stop:
                raise LoopedError(f"stop strings need a tokenizer, and {self.model.name} has none; use stop_token_ids")
            return None
        return Detokenizer(tokenizer, tuple(params.stop), params.min_tokens)
