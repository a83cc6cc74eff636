"""Errors a user can cause. The command line prints the sentence and exits with code 2; the server answers 4xx."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Number


class LoopedError(Exception):
    """One clear sentence: what was given, what is allowed, what to do."""


def one_line(error: Exception) -> str:
    """What another library says of an error, for the end of such a sentence."""
    return " ".join(str(error).split())[:200]


def shown(value: object, most: int = 60) -> str:
    """A value as a sentence quotes it: one line of at most `most` characters. Any value at all, however large."""
    try:
        text = " ".join((str(value) if isinstance(value, Number) else repr(value)).split())
    except ValueError:  # Python writes out no whole number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= most else text[: most - 1] + "…"


def unknown(kind: str, name: str, options: Iterable[str]) -> LoopedError:
    """The error for a name that is none of `options`, with the nearest one suggested."""
    choices = list(options)
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return LoopedError(f"unknown {kind} {shown(name, 200)}; {hint}known: {', '.join(choices)}")
