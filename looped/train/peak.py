"""What a device multiplies at most in a second, which MFU is quoted against."""

from __future__ import annotations

import functools

import torch

from looped.analysis.device import product_flops

# Dense bfloat16 FLOP/s by what the driver calls the card; the first name that it contains counts.
PEAKS = (
    ("GB200", 2500e12), ("B200", 2250e12), ("H200", 989e12), ("GH200", 989e12), ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12), ("H100", 989e12), ("H800", 989e12), ("H20", 148e12), ("A100", 312e12), ("A800", 312e12),
    ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12), ("A40", 150e12), ("A10G", 70e12), ("A10", 125e12),
    ("RTX 5090", 209e12), ("RTX 4090", 165e12), ("RTX 3090", 71e12), ("MI300X", 1307e12), ("MI250X", 383e12),
)  # fmt: skip


@functools.cache
def peak_flops(device: torch.device) -> tuple[float, str]:
    """FLOP/s of one device in the precision that it trains in, and where the number comes from."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, flops in PEAKS:
            if part in name:
                return flops, f"peak of {part}"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return product_flops(device, dtype), "measured product of square matrices"
