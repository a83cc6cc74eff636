"""Our model as lm-evaluation-harness sees it: generation on the engine, log-likelihoods by full sequences."""

# B rows, T tokens, V vocabulary

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import lm_eval.models  # noqa: F401  (a model registered before this import hides the built-in ones)
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from looped.errors import LoopedError, unknown
from looped.eval.distributed import ALONE, World
from looped.eval.result import Answer
from looped.infer import LLM, SamplingParams
from looped.progress import Progress, progress

if TYPE_CHECKING:
    from looped.infer import Completion

MAX_LOGITS = 1 << 26  # entries of the logits of one log-likelihood batch: 256 MiB in float32
ENGINE_OPTIONS = {field.name for field in fields(SamplingParams)} - {"stop", "max_tokens", "temperature", "n"}

Key = tuple[str | None, int | None, int]
Tokens = tuple[tuple[str, str] | None, list[int], list[int]]


class _Ready(NamedTuple):
    """A request in the engine's terms."""

    prompt_ids: list[int]
    params: SamplingParams
    until: list[str]
    truncated: bool


class HarnessLM(TemplateLM):
    """One engine as a model of the library. `answers` keeps what it drops: depths, by (task, doc_id, idx).

    The library hands over all requests of a task in one call; they go to the engine in one call, so batches stay full.
    """

    def __init__(
        self, llm: LLM, max_gen_toks: int = 256, depth: int | None = None, world: World = ALONE, show: bool = False
    ) -> None:
        super().__init__()
        if llm.model.tokenizer is None:
            raise LoopedError(f"{llm.model.name} has no tokenizer; evaluation needs tokenizer.json in its folder")
        self.llm, self.model, self._codec = llm, llm.model, llm.model.tokenizer
        self.max_gen_toks, self.depth, self.world, self.show = max_gen_toks, depth, world, show
        self.answers: dict[Key, Answer] = {}
        self.num_tokens, self.seconds = 0, 0.0

    # What the library asks of a model.

    @property
    def max_length(self) -> int:
        return self.model.config.max_positions

    @property
    def eot_token_id(self) -> int:
        return self.model.config.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self.model.config.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.model.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the library stores about the model beside its scores."""
        return {"model_name": self.model.name, "model_revision": self.model.revision, "model_dtype": self.model.dtype}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._codec.encode(string, add_special_tokens is not False)

    # Several processes: each answers its share.

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.world.all_gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        return self.world.gather_object(obj, dst)

    def barrier(self) -> None:
        self.world.barrier()

    # Generation.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers in the order of the requests, cut before the first of their stop strings."""
        seen: Counter[Key] = Counter()
        ready = []
        for request in requests:
            context, gen_kwargs = request.args[:2]
            ready.append(self._prepare(context, gen_kwargs, repeat=seen[_key(request)]))
            seen[_key(request)] += 1
        started = time.perf_counter()
        done = self.llm.generate([item.prompt_ids for item in ready], [item.params for item in ready], self.show)
        self.seconds += time.perf_counter() - started
        texts = []
        for request, item, completion in zip(requests, ready, done, strict=True):
            text = postprocess_generated_text(completion.text, item.until, None)
            self._keep(request, item, completion, text)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _prepare(self, context: str, gen_kwargs: dict[str, Any], repeat: int) -> _Ready:
        options = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        until, max_toks = list(options.pop("until")), options.pop("max_gen_toks")
        sampled, temperature = options.pop("do_sample", False), options.pop("temperature", 0.0)
        for name in options:
            if name not in ENGINE_OPTIONS:
                raise unknown("generation option", name, sorted(ENGINE_OPTIONS))
        room = self.max_length - max_toks
        if room < 1:
            raise LoopedError(
                f"max_gen_toks is {max_toks}; the context of {self.max_length} tokens must also hold a prompt"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        temperature = temperature if sampled else 0.0
        if temperature > 0 and repeat:  # repeated samples of one prompt must differ
            options["seed"] = options.get("seed", self.llm.engine.options.seed) + repeat
        params = SamplingParams(
            temperature=temperature, max_tokens=max_toks, stop=until, stop_token_ids=self._special(until), **options
        )
        return _Ready(ids[-room:], params, until, len(ids) > room)

    def _special(self, until: Iterable[str]) -> list[int]:
        """Stop strings that are one token: decoding drops special tokens, so the text would not show them."""
        found = (self._codec.token_to_id(stop) for stop in until)
        return [token for token in found if token is not None]

    def _keep(self, request: Instance, item: _Ready, completion: Completion, text: str) -> None:
        key = _key(request)
        if key in self.answers:
            return  # padding that evens out the processes, or a repeat
        self.answers[key] = Answer(
            doc_id=request.doc_id if request.doc_id is not None else -1,
            text=text,
            depths=tuple(completion.depths),
            finish_reason=completion.finish_reason,
            prompt_tokens=len(item.prompt_ids),
            truncated=item.truncated,
        )
        self.num_tokens += len(completion.token_ids)

    # Log-likelihoods: no cache, full sequences, at full depth or at the fixed one.

    def _loglikelihood_tokens(
        self, requests: Sequence[Tokens], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy decoding would give it) of each (_, context ids, continuation ids).

        Requests whose inputs are equal share one row: choices of one token after the same context cost one.
        """
        inputs: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            inputs.setdefault(tuple((context + continuation)[-(self.max_length + 1) :][:-1]), []).append(i)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        rows = sorted(inputs, key=len, reverse=True)
        bar: Progress[None] | None = progress(len(rows), "log-likelihood") if self.show else None
        for batch in _batches(rows, self.model.config.vocab_size):
            logits = self._logits(batch)
            for row, ids in enumerate(batch):
                for i in inputs[ids]:
                    results[i] = _score(logits[row, : len(ids)], requests[i][2])
            if bar is not None:
                bar.advance(len(batch))
        if bar is not None:
            bar.close()
        for (key, _, _), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    @torch.inference_mode()
    def _logits(self, batch: Sequence[tuple[int, ...]]) -> Tensor:
        """[B, T, V] of rows padded on their right, which causal attention never looks at."""
        width = len(batch[0])
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=self.model.device)
        seeds = torch.full_like(ids, self.llm.engine.options.seed)
        state = self.model.init_state(seeds, torch.arange(width, device=ids.device).expand_as(ids))
        return self.model.logits(ids, self.depth, state)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the context's length that predict each token once."""
        windows: list[Tokens] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            pieces = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, predicted in map(make_disjoint_window, pieces):
                windows.append((None, context, predicted))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals


def _key(request: Instance) -> Key:
    return request.task_name, request.doc_id, request.idx


def _batches(rows: Sequence[tuple[int, ...]], vocab_size: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """Rows, longest first, in batches whose logits stay within MAX_LOGITS entries."""
    start = 0
    while start < len(rows):
        size = max(1, MAX_LOGITS // (max(1, len(rows[start])) * vocab_size))
        yield rows[start : start + size]
        start += size


def _score(logits_TV: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """Log-probability of the continuation, which the last rows predict, and whether each token has the top logit."""
    wanted = torch.tensor(list(continuation), device=logits_TV.device)
    ends = logits_TV[-len(continuation) :].float()
    picked = ends.log_softmax(-1).gather(1, wanted[:, None])
    return float(picked.sum()), bool((ends.argmax(-1) == wanted).all())
