"""The inference engine: continuous depth batching over slots and paged KV.

What happens to a request:

1. `LLM.generate` (or the server) turns text into token ids and wraps them, with `SamplingParams`, in a `Request`.
2. `Engine.add` checks it: context, depth options, and whether its prompt plus `max_tokens` could ever fit the KV pool.
   A request that cannot run is refused here. It joins the waiting queue, first come first served.
3. `Engine.step` asks the `Scheduler` for the next stage. The scheduler sees queues of slot numbers and nothing else.
4. Admission: a free slot, S free slots if decode would be interrupted, and free KV pages for the worst case beyond the
   headroom. The request gets its slot and its pages are promised; parameters go into the slot's row of `DeviceState`.
5. Prefill: up to M prompt tokens of several requests, packed, at full depth. Pages are taken as chunks arrive; at loop
   step r a token reads step-r keys of its own chunk and the stored planes of earlier ones. Only a finished prompt's
   last token reaches the LM head; it gives token 0, whose depth is R, and the gate's carry.
6. Prelude: the new token's embedding and the layers before the core; the gate's state starts.
7. Core: one loop step for all slots in the batch, whatever step each is at. Every row reads its own plane through the
   page table. The gate (or the forced exit at `max_depth`) says who leaves.
8. Exit: planes the token never wrote are copied from its last one, or aliased in the page table (`ragged`), and what it
   did not use is given back. The slot waits for the coda.
9. Coda: the layers after the core, the head, the next token, the carry. The engine checks EOS, stop strings and
   lengths. An unfinished sequence goes back to 6.
10. A finished, aborted or failed one gives back its slot and pages at once.

`cb`, `no-refill` and `refill` differ only in the order of stages 5 to 9 (`scheduler.py`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looped.infer.engine import Engine
    from looped.infer.llm import LLM
    from looped.infer.options import EngineOptions
    from looped.infer.request import Completion, Output, Request, SamplingParams
    from looped.infer.stats import Stats

__all__ = ["LLM", "Completion", "Engine", "EngineOptions", "Output", "Request", "SamplingParams", "Stats"]

# Loaded on first use, so that the scheduler and the requests can be imported without torch.
_HOMES = {
    "Engine": "engine",
    "LLM": "llm",
    "EngineOptions": "options",
    "Completion": "request",
    "Output": "request",
    "Request": "request",
    "SamplingParams": "request",
    "Stats": "stats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'looped.infer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"looped.infer.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
