"""`looped.LLM`: the offline API over the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch

from looped import checks
from looped.decode import PrefillSchedule
from looped.errors import LoopedError
from looped.gates import Gate
from looped.infer.engine import Engine
from looped.infer.options import EngineOptions
from looped.infer.request import Completion, Output, Request, SamplingParams
from looped.infer.stats import Stats
from looped.kv import KVLayout
from looped.model import LoopedLM, load
from looped.model.loading import parse_device, parse_dtype
from looped.progress import Progress, progress

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class _Sample:
    """One of the samples of a prompt."""

    prompt: Prompt
    index: int
    request: Request


class LLM:
    """A looped language model served by continuous depth batching, for lists of prompts.

    model: a name, hub id or folder, or a loaded model.
    mode: the scheduler: "refill", "no-refill", or "cb" (token-level batching, every token at full depth).
    kv: KV layout, None for the model's own. gate: name, folder or object, None for full depth.
    threshold, min_depth: of the gate, None for its own; `SamplingParams` can override them per request.
    depth: run with fewer loops, prompt and decode alike. compute: "dense" runs and stores all R loops, and the gate
    only picks the output.
    prefill: "ragged" lets prompt tokens leave early, at prefill_threshold (a number, or a `PrefillSchedule`; None is
    the threshold of decode). mix_prefill: prompt pieces ride along with core steps.
    exits: how the host learns of them: "sync" waits for every step, "lookahead" runs a step behind (gates that know
    one step ahead), "device" leaves them on the device, "auto" is "device" on a GPU and "sync" elsewhere.
    max_num_seqs, max_num_batched_tokens, min_free_slots, min_coda_batch, kv_headroom: W, M, S, K and rho of the paper;
    None is max(1, W // 8) for S, and for K 1 for fully looped models, else W // 4.
    chunk_size: prompts are cut at its multiples; None leaves a prompt whole where cuts change the result, and
    elsewhere cuts it only to keep to `max_num_batched_tokens`.
    num_pages, page_size: the KV pool; None takes what memory allows, and 16 tokens a page (1 for `ragged`).
    preemption: what makes room when the pool is full: "recompute" or "offload" the K/V of the newest sequence, "auto"
    the one that is exact for the layout, "off" admits only what fits to its end. prefix_caching: prompts share the
    K/V of equal beginnings.
    backend: attention; graphs: CUDA graphs, without effect on a CPU.
    dtype, device: how to load a model given by name; None is float32 and the first GPU, else the CPU.
    seed: for requests without their own.

    Raises `LoopedError` for options out of range, and for those that exclude each other.
    """

    def __init__(
        self,
        model: str | Path | LoopedLM,
        mode: str = "refill",
        kv: str | KVLayout | None = None,
        gate: str | Path | Gate | None = None,
        threshold: float | None = None,
        min_depth: int | None = None,
        depth: int | None = None,
        compute: str = "sparse",
        prefill: str = "dense",
        prefill_threshold: float | PrefillSchedule | None = None,
        mix_prefill: bool = False,
        exits: str = "auto",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        chunk_size: int | None = None,
        min_free_slots: int | None = None,
        min_coda_batch: int | None = None,
        kv_headroom: float = 0.0,
        num_pages: int | None = None,
        page_size: int | None = None,
        preemption: str | None = "auto",
        prefix_caching: bool = False,
        backend: str = "auto",
        graphs: bool = True,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
    ) -> None:
        options = EngineOptions(
            mode=mode,
            kv=kv,
            gate=gate,
            threshold=threshold,
            min_depth=min_depth,
            depth=depth,
            compute=compute,
            prefill=prefill,
            prefill_threshold=prefill_threshold,
            mix_prefill=mix_prefill,
            exits=exits,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk_size=chunk_size,
            min_free_slots=min_free_slots,
            min_coda_batch=min_coda_batch,
            kv_headroom=kv_headroom,
            num_pages=num_pages,
            page_size=page_size,
            preemption=preemption,
            prefix_caching=prefix_caching,
            backend=backend,
            graphs=graphs,
            seed=seed,
        )
        options.check()
        self.model = _model(model, dtype, device)
        self.engine = Engine(self.model, options)
        self._calls = 0

    @property
    def stats(self) -> Stats:
        """Counts and times of the engine so far."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        show_progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts (texts or lists of token ids), in their order. One parameter set serves all, or one each.

        The completions come prompt by prompt, `n` each, which `Completion.index` counts. `show_progress` shows a
        progress bar. Raises `LoopedError` before anything runs if one of the prompts cannot.
        """
        texts = _prompts(prompts)
        params = _params(sampling_params, len(texts))
        self._calls += 1
        samples = self._samples(texts, params)
        outputs: dict[str, list[Output]] = {sample.request.key: [] for sample in samples}
        try:
            for sample in samples:
                self.engine.add(sample.request)
            self._drain(outputs, show_progress)
        except BaseException:
            for key in outputs:
                self.engine.abort(key)
            raise
        return [self._completion(sample, outputs[sample.request.key]) for sample in samples]

    def _samples(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[_Sample]:
        """One request for each sample of each prompt."""
        samples: list[_Sample] = []
        for prompt, given in zip(prompts, params, strict=True):
            ids = tuple(self._encode(prompt))
            for index in range(given.n):
                key, child = f"call-{self._calls}-{len(samples)}", given.child(index, self.engine.options.seed)
                samples.append(_Sample(prompt, index, Request(key, ids, child, ordinal=len(samples), stream=False)))
        return samples

    def _drain(self, outputs: dict[str, list[Output]], show: bool) -> None:
        """Step until every request of the call is done."""
        left = len(outputs)
        bar: Progress[None] | None = progress(left, "generate") if show else None
        while left:
            if not self.engine.has_work:
                raise RuntimeError(f"the engine stopped with {left} requests unfinished")
            for output in self.engine.step():
                if output.key not in outputs:
                    continue
                outputs[output.key].append(output)
                if output.finished:
                    left -= 1
                    if bar is not None:
                        bar.advance()
        if bar is not None:
            bar.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return checks.token_ids("a prompt", prompt)
        if self.model.tokenizer is None:
            raise LoopedError(f"{self.model.name} has no tokenizer: give prompts as lists of token ids")
        return self.model.tokenizer.encode(prompt)

    def _completion(self, sample: _Sample, outputs: list[Output]) -> Completion:
        new = [output for output in outputs if output.token is not None]
        token_ids = [output.token for output in new if output.token is not None]
        params = sample.request.params
        text = "".join(output.text for output in outputs)
        if not params.stop and self.model.tokenizer is not None:
            text = self.model.tokenizer.decode(token_ids)
        wanted = params.logprobs is not None
        return Completion(
            text=text,
            token_ids=token_ids,
            depths=[output.depth for output in new],
            finish_reason=outputs[-1].finish_reason or "error",
            prompt_token_ids=list(sample.request.prompt_ids),
            prompt=sample.prompt if isinstance(sample.prompt, str) else None,
            index=sample.index,
            logprobs=[_known(output.logprob) for output in new] if wanted else None,
            top_logprobs=[output.top_logprobs[: params.logprobs] for output in new] if wanted else None,
        )


def _known(logprob: float | None) -> float:
    assert logprob is not None, "the engine reports log-probabilities where they were asked for"
    return logprob


def _model(
    model: str | Path | LoopedLM, dtype: str | torch.dtype | None, device: str | torch.device | None
) -> LoopedLM:
    if not isinstance(model, LoopedLM):
        return load(model, device=device, dtype="float32" if dtype is None else dtype)
    if dtype is not None and parse_dtype(dtype) != model.dtype:
        raise LoopedError(f"the model is loaded in {model.dtype}; load it in {dtype} or leave dtype out")
    if device is not None and parse_device(device).type != model.device.type:
        raise LoopedError(f"the model is loaded on {model.device}; load it on {device} or leave device out")
    return model


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor of token ids, of one prompt or of several
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise LoopedError(f"prompts must be texts or lists of token ids, got {prompts!r}")
    prompts = list(prompts)  # type: ignore[assignment]
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, list | tuple) or not all(isinstance(params, SamplingParams) for params in given):
        raise LoopedError(f"sampling parameters must be SamplingParams or a list of them, got {given!r}")
    if len(given) != count:
        raise LoopedError(f"{count} prompts but {len(given)} sets of sampling parameters; give one, or one a prompt")
    return list(given)
