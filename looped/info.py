"""`looped info`: a model's card, from its configuration alone. No weights are read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from looped.kv import LAYOUT_NAMES, get_layout
from looped.options import argument, option
from looped.progress import last_json

if TYPE_CHECKING:
    from looped.config import ModelConfig
    from looped.gates.card import GateCard

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Options:
    """Print a model's card: shape, parameters, bytes per token of every KV layout, speedup bound, gates."""

    model: str = argument("name, hub id or folder", default="tiny-ouro")
    max_loops: int | None = option(None, "R to run with; what the checkpoint states when left out")
    dtype: Literal["bfloat16", "float32", "float64"] = option("bfloat16", "type of the K/V cache")
    json: bool = option(False, "end with the card as one line of JSON")


class LayoutCost(NamedTuple):
    """K/V of one token under a layout; under `ragged` the most it can take, at full depth."""

    name: str
    num_planes: int
    bytes: int


class Card(NamedTuple):
    """What `looped info` prints."""

    model: str
    config: ModelConfig
    num_params: int
    layouts: list[LayoutCost]
    gates: list[GateCard]


def run(options: Options) -> int:
    """Print the card; with `json` also as the last line."""
    card = read(options)
    lines = rows(card)
    width = max(15, *(len(name) for name, _ in lines)) + 2
    for name, text in lines:
        print(f"{name:<{width}}{text}")
    if options.json:
        last_json(card._replace(config=asdict(card.config)))  # type: ignore[arg-type]
    return 0


def read(options: Options) -> Card:
    """The card of the model that `options` names. Raises LoopedError for what `looped.load` refuses by its config."""
    import torch

    from looped.gates.card import read_card
    from looped.model.loading import find_checkpoint, read_config
    from looped.model.looped_lm import LoopedLM

    folder = find_checkpoint(options.model)
    config = read_config(folder)[0].with_loops(options.max_loops)
    with torch.device("meta"):
        num_params = sum(weight.numel() for weight in LoopedLM(config).parameters())
    gates = [read_card(file.parent) for file in sorted(folder.glob("gates/*/gate.json"))]
    return Card(options.model, config, num_params, layout_costs(config, DTYPE_BYTES[options.dtype]), gates)


def layout_costs(config: ModelConfig, dtype_bytes: int) -> list[LayoutCost]:
    """Every layout's planes and bytes per token, `modulo-2` for all of its kind."""
    names = ["modulo-2" if name == "modulo-m" else name for name in LAYOUT_NAMES]
    planes = {name: get_layout(name).num_planes(config.max_loops) for name in names}
    return [LayoutCost(name, num, config.kv_bytes_per_token(num, dtype_bytes)) for name, num in planes.items()]


def rows(card: Card) -> list[tuple[str, str]]:
    """The card as (label, text) lines."""
    config = card.config
    split = f"{config.num_prelude_layers}-{config.num_core_layers}-{config.num_coda_layers}"
    heads = f"{config.num_heads} heads of {config.head_dim}"
    if config.num_kv_heads != config.num_heads:
        heads += f", {config.num_kv_heads} of them for K and V"
    bounds = {depth: config.speedup_bound(depth) for depth in range(1, config.max_loops + 1)}
    shown = sorted({1, *range(config.max_loops // 4, config.max_loops + 1, max(1, config.max_loops // 4))} - {0})
    lines = [
        ("model", f"{card.model} ({config.family})"),
        (
            "layers",
            f"{split} (prelude-core-coda), core run {config.max_loops} times, trained with {config.trained_loops}",
        ),
        (
            "shape",
            f"width {config.hidden_size}, MLP {config.intermediate_size}, {heads}, vocabulary {config.vocab_size}",
        ),
        ("context", f"{config.max_positions} positions"),
        (
            "parameters",
            f"{card.num_params:,}; {config.core_params:,} run every loop, {config.boundary_params:,} once a token",
        ),
        ("speedup bound", "  ".join(f"{bounds[depth]:.2f} at mean depth {depth}" for depth in shown)),
    ]
    for cost in card.layouts:
        default = ", the default" if cost.name == config.default_layout else ""
        lines.append((f"kv {cost.name}", f"{cost.bytes:,} bytes per token, {_planes(cost)}{default}"))
    native = f"native, exits at C(r) >= {config.exit_threshold:g}" if config.exit_gate else "none of its own"
    lines.append(("gate", native))
    for gate in card.gates:
        lines.append(
            (f"gate {gate.kind}", f"threshold {gate.threshold:g}, made for {gate.layout} and {gate.prefill} prefill")
        )
    return lines


def _planes(cost: LayoutCost) -> str:
    if get_layout(cost.name).aliases:
        return f"at most {cost.num_planes} planes: one for each loop the token ran"
    return f"{cost.num_planes} plane{'s' if cost.num_planes > 1 else ''}"
