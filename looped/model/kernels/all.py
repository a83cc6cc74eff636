"""Every kernel's launcher, for `looped.model.ops`, which imports this where Triton is installed."""

from looped.model.kernels.largest import largest_of
from looped.model.kernels.launch import overlaps
from looped.model.kernels.norms import merge_rows, norm_rows, sum_norm_rows
from looped.model.kernels.products import (
    describe,
    gated_linear,
    head_largest,
    head_logits,
    joined_parts,
    linear_parts,
    serves,
)
from looped.model.kernels.rope import angle_rows, rope_rows
from looped.model.kernels.silu import silu_mul_rows

__all__ = [
    "angle_rows",
    "describe",
    "gated_linear",
    "head_largest",
    "head_logits",
    "joined_parts",
    "largest_of",
    "linear_parts",
    "merge_rows",
    "norm_rows",
    "overlaps",
    "rope_rows",
    "serves",
    "silu_mul_rows",
    "sum_norm_rows",
]
