"""What a student is to be, in one word with options: `lookahead`, `lookahead:shared:change`, `pre-loop:embedding`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from looped.errors import LoopedError, unknown
from looped.gates.hazard import PreLoopGate
from looped.gates.losses import LOSSES

KINDS = ("lookahead", "pre-loop", "hybrid", "stage2", "same-step", "convergence", "delayed-convergence")
"""Kinds of gates that can be trained; the last two have a threshold to be found and nothing else."""
CRITERIA = KINDS[-2:]
_ALL = ("lookahead", "pre-loop")
Sharing = Literal["per-step", "shared", "single"]
Target = Literal["teacher", "retrospective", "prospective"]
_SHARING, _TARGETS = get_args(Sharing), get_args(Target)
_MLP_UNITS = 256
_ON_STEPS = ("lookahead", "hybrid", "stage2", "same-step")
_BEFORE = ("pre-loop", "hybrid")


@dataclass(frozen=True)
class Spec:
    """A student: what its heads see, how they share weights, whom they learn from and by which loss.

    `shared` heads have one set of weights for all steps and a bias for each, `single` ones that bias in common too.
    """

    text: str
    kind: str
    hidden: int = 0
    loss: str = "kl"
    sharing: Sharing = "per-step"
    change: bool = False
    inputs: tuple[str, ...] = PreLoopGate.known_inputs
    softmax: bool = False
    target: Target = "teacher"

    @property
    def name(self) -> str:
        """The text as a folder's name."""
        return self.text.replace(":", "-").replace("=", "")

    @property
    def needs_token_before(self) -> bool:
        """It looks at the token before, so it cannot run in a ragged prefill."""
        return self.kind in _BEFORE and self.inputs != ("embedding",)


def parse_specs(texts: tuple[str, ...], hidden: int = 0, loss: str = "kl") -> list[Spec]:
    """The students of texts, `all` standing for `lookahead` and `pre-loop`; `hidden` units and `loss` where they say
    nothing else. Raises LoopedError for unknown words, for those that do not suit a kind, and for no student."""
    words = list(dict.fromkeys(word for text in texts for word in (_ALL if text == "all" else (text,))))
    if not words:
        raise LoopedError(f"no gate to train was given; known: {', '.join(KINDS)}, all")
    return [_parse(word, hidden, loss) for word in words]


def _parse(text: str, hidden: int, loss: str) -> Spec:
    kind, *words = text.split(":")
    if kind not in KINDS:
        raise unknown("gate to train", kind, [*KINDS, "all"])
    spec = Spec(text, kind, hidden, loss)
    if kind in CRITERIA:
        spec = replace(spec, hidden=0, loss="kl")
    if kind == "stage2":
        spec = replace(spec, sharing="single", target="retrospective", loss="bce")
    if kind == "same-step":
        spec = replace(spec, sharing="single")
    for word in words:
        spec = _with(spec, word)
    return spec


def _with(spec: Spec, word: str) -> Spec:
    """The spec changed by one word."""
    name, _, value = word.partition("=")
    if spec.kind not in CRITERIA:
        if word == "linear":
            return replace(spec, hidden=0)
        if name == "mlp":
            if value and not (value.isdecimal() and int(value) > 0):
                raise LoopedError(f"{spec.text}: mlp= takes a number of hidden units, got {value!r}")
            return replace(spec, hidden=int(value) if value else spec.hidden or _MLP_UNITS)
        if word in LOSSES and spec.kind != "stage2":
            return replace(spec, loss=word)
        if word in _TARGETS and (word != "teacher" or spec.kind != "stage2") and spec.kind != "same-step":
            return replace(spec, target=cast(Target, word))
        if word in _SHARING and spec.kind in _ON_STEPS:
            return replace(spec, sharing=cast(Sharing, word))
        if word == "change" and spec.kind in ("lookahead", "hybrid"):
            return replace(spec, change=True)
        if word == "softmax" and spec.kind == "pre-loop":
            return replace(spec, softmax=True)
        parts = word.split("+")
        if spec.kind in _BEFORE and set(parts) <= set(PreLoopGate.known_inputs):
            return replace(spec, inputs=tuple(name for name in PreLoopGate.known_inputs if name in parts))
    raise unknown(f"{spec.text}: option of a {spec.kind} gate", word, _words(spec.kind))


def _words(kind: str) -> list[str]:
    if kind in CRITERIA:
        return []
    words = ["linear", "mlp", "mlp=N"]
    words += LOSSES if kind != "stage2" else []
    words += _TARGETS[1:] if kind != "same-step" else []
    words += _SHARING if kind in _ON_STEPS else []
    words += ["change"] if kind in ("lookahead", "hybrid") else []
    words += ["softmax"] if kind == "pre-loop" else []
    return words + ([*PreLoopGate.known_inputs, "embedding+depth"] if kind in _BEFORE else [])
