"""Types of what a caller of the Python API hands over: a sentence where a comparison deep inside would fail. No torch.

The command line needs none of this: its values arrive converted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Integral, Real

from looped.errors import LoopedError, shown


def whole_numbers(**values: object) -> None:
    """Refuse values that are neither whole numbers nor None."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise LoopedError(f"{name} must be a whole number, got {shown(value)}")


def numbers(**values: object) -> None:
    """Refuse values that are neither numbers nor None."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise LoopedError(f"{name} must be a number, got {shown(value)}")
        try:
            float(value or 0)
        except OverflowError:
            raise LoopedError(f"{name} must be a finite number, got {shown(value)}") from None


def given(**values: object) -> None:
    """Refuse None."""
    for name, value in values.items():
        if value is None:
            raise LoopedError(f"{name} must not be None")


def token_ids(name: str, values: object) -> list[int]:
    """Whole numbers of any kind (Python's, numpy's, torch's) as a list of Python's."""
    if not isinstance(values, str) and isinstance(values, Iterable):
        try:
            return [operator.index(value) for value in values]
        except TypeError:
            pass
    raise LoopedError(f"{name} must be a sequence of whole numbers, got {shown(values)}")
