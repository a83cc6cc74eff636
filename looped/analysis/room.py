"""How many KV pages an engine of the bench gets, so that several of them fit beside each other."""

from __future__ import annotations

import torch

from looped.analysis.worklist import WorkList
from looped.infer.options import EngineOptions
from looped.infer.pages import check_page_size
from looped.kv import get_layout
from looped.model import LoopedLM

# Of the free memory, what the pools of all engines may take; the rest is for graphs and batches.
SHARE = 0.75


def num_pages(model: LoopedLM, options: EngineOptions, work: WorkList, engines: int) -> int | None:
    """Core pages for one of `engines` engines on a GPU: room for the W longest requests of the list, within its part of
    the free memory. What the user gave, else None on a CPU, where pools are small."""
    if options.num_pages is not None or model.device.type != "cuda":
        return options.num_pages
    layout = get_layout(options.kv or model.config.default_layout)
    size, planes = check_page_size(options.page_size, layout), layout.num_planes(model.config.max_loops)
    lengths = sorted((len(item.prompt_ids) + item.output_len for item in work.items), reverse=True)
    wanted = sum(-(-length // size) + 1 for length in lengths[: options.max_num_seqs])
    block_bytes = size * model.config.kv_bytes_per_token(planes, model.dtype.itemsize)
    affordable = int(torch.cuda.mem_get_info(model.device)[0] * SHARE) // engines // block_bytes
    return planes * max(1, min(wanted, affordable))
