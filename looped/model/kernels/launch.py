"""What the kernels share: overlapped launches, sizes of blocks, and whether Triton interprets.

Programmatic dependent launch (Hopper and newer): a kernel may start while the one before it still runs, if that one
has said so. Every kernel here says so at once, asks the L2 cache for what no kernel writes (weights), and then waits
for the one before it to be complete. So what it reads and writes after `after_previous` is ordered as on any stream,
through any number of such kernels, and launches cost no gap in which the memory idles.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# No postponed annotations in kernel files: Triton reads `tl.constexpr` off the parameters.

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Let the next kernel start, and wait until the one before this is complete."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ask_for(pointers, NUM_BYTES: tl.constexpr):
    """Bring `NUM_BYTES` (a multiple of 16) behind each pointer into the L2 cache; nothing waits for it."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, NUM_BYTES, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def interpreting() -> bool:
    """Whether kernels defined from now on are interpreted."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device may start before the previous one ends."""
    return device.type == "cuda" and not interpreting() and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of every launch: `OVERLAP`, and the launch attribute that goes with it."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`, and at least `least`."""
    return max(int(triton.next_power_of_2(size)), least)
