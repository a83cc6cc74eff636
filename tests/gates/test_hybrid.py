"""The hybrid gate: which part decides what, in the reference decoder, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import looped
from looped.decode import generate
from looped.errors import LoopedError
from looped.gates import HybridGate, LookaheadGate, PreLoopGate, get_gate, load_gate
from looped.gates.card import GateCard
from looped.gates.checkpoint import save_gate
from looped.gates.trained import Hidden
from looped.model import LoopedLM
from tests.models import micro_huginn, micro_ouro, random_lookahead, random_pre_loop

MODEL = micro_ouro()
PROMPT = [3, 14, 15, 9, 26, 5]


def hybrid(model: LoopedLM = MODEL) -> HybridGate:
    return HybridGate(random_pre_loop(model), random_lookahead(model))


def constant(hazards: tuple[float, float, float]) -> HybridGate:
    """A hybrid gate that predicts the same hazards for every token; the other heads of its pre-loop part say 0.99."""
    first, *rest = (torch.logit(torch.tensor([p])) for p in hazards)
    made = {
        "hidden_size": MODEL.config.hidden_size,
        "max_loops": MODEL.config.max_loops,
        "teacher": MODEL.name,
        "revision": MODEL.revision,
    }
    others = torch.logit(torch.tensor([0.99, 0.99]))
    pre_loop = PreLoopGate(torch.zeros(3, 2 * made["hidden_size"] + 3), torch.cat((first, others)), **made)
    return HybridGate(pre_loop, LookaheadGate(torch.zeros(2, made["hidden_size"]), torch.cat(rest), **made))


def depths(gate: HybridGate, threshold: float, min_depth: int | None = None, model: LoopedLM = MODEL) -> list[int]:
    options = {"gate": gate, "threshold": threshold, "min_depth": min_depth, "layout": "ragged"}
    return generate(model, PROMPT, max_new_tokens=24, ignore_eos=True, **options).depths  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threshold", "depth"), [(0.1, 1), (0.19, 1), (0.21, 2), (0.39, 2), (0.41, 3), (0.69, 3), (0.71, 4), (1.0, 4)]
)
def test_the_reference_decoder_exits_where_the_cumulative_probability_crosses(threshold: float, depth: int) -> None:
    # C = .2 .4 .7
    assert depths(constant((0.2, 0.25, 0.5)), threshold) == [4] + [depth] * 23


def test_nothing_is_folded_unless_min_depth_is_raised() -> None:
    gate = constant((0.5, 0.01, 0.01))
    assert gate.min_depth == 1
    assert set(depths(gate, 0.4)[1:]) == {1}
    assert set(depths(gate, 0.4, min_depth=2)[1:]) == {2}  # C(2) holds the mass of depth 1
    assert set(depths(gate, 0.52, min_depth=1)[1:]) == {4}


def test_each_part_decides_its_steps() -> None:
    """At e = 1 it is the pre-loop gate; with a pre-loop part that never exits, the lookahead gate."""
    gate, threshold = hybrid(), 0.5
    assert (gate.latency, gate.uses_carry, gate.name) == (1, True, "hybrid")
    mixed = depths(gate, threshold)
    assert set(mixed[1:]) == {1, 2, 3, 4}
    never = random_pre_loop(MODEL)
    never.weight_NF, never.bias_N = torch.zeros_like(never.weight_NF), torch.full_like(never.bias_N, -100.0)
    lookahead = random_lookahead(MODEL)
    wanted = generate(MODEL, PROMPT, max_new_tokens=24, ignore_eos=True, gate=lookahead, threshold=0.5, layout="ragged")
    assert depths(HybridGate(never, lookahead), 0.5) == wanted.depths
    always = random_pre_loop(MODEL)
    always.weight_NF, always.bias_N = never.weight_NF, -never.bias_N
    assert set(depths(HybridGate(always, lookahead), 0.99)[1:]) == {1}


def test_parts_of_two_teachers_are_refused() -> None:
    with pytest.raises(LoopedError, match="two parts of one teacher; their revision are"):
        HybridGate(random_pre_loop(MODEL), random_lookahead(micro_ouro(seed=5)))
    with pytest.raises(LoopedError, match="their teacher are 'random-ouro' and 'random-huginn'"):
        HybridGate(random_pre_loop(MODEL), random_lookahead(micro_huginn()))


def test_it_is_bound_to_its_teacher_and_needs_a_token_before() -> None:
    gate = hybrid().bind(MODEL)
    assert gate.lookahead.weight_NF.dtype == torch.float64
    for other in (micro_ouro(seed=5), micro_huginn()):
        with pytest.raises(LoopedError, match="this hybrid gate was made for random-ouro"):
            gate.bind(other)
    with pytest.raises(LoopedError, match="cannot run in a ragged prefill"):
        generate(MODEL, PROMPT, gate=hybrid(), threshold=0.5, layout="ragged", prefill="ragged")


def write(gate: HybridGate, folder: Path) -> None:
    card = GateCard(
        "hybrid", gate.teacher, gate.revision, gate.hidden_size, gate.max_loops, 1, 1, "ragged", "dense", 0.6
    )
    save_gate(gate, card, folder)


@pytest.mark.parametrize("units", [0, 5])
def test_round_trip(tmp_path: Path, units: int) -> None:
    pre_loop, lookahead = random_pre_loop(MODEL), random_lookahead(MODEL)
    if units:
        for part, layers in ((pre_loop, 1), (lookahead, 2)):
            heads, features = part.weight_NF.shape
            shapes = ((layers, units, features), (layers, units), (heads, units))
            part.hidden = Hidden(*(torch.randn(shape) for shape in shapes))
    gate = HybridGate(pre_loop, lookahead)
    write(gate, tmp_path)
    tensors = load_file(tmp_path / "gate.safetensors")
    assert tensors["pre-loop.weight"].shape == (1, 51) and tensors["lookahead.weight"].shape == (2, 24)
    assert ("pre-loop.hidden.out" in tensors) == ("lookahead.hidden.out" in tensors) == bool(units)
    again = get_gate(tmp_path, MODEL)
    assert isinstance(again, HybridGate)
    assert (again.threshold, again.min_depth, again.layout, again.prefill) == (0.6, 1, "ragged", "dense")
    assert depths(again, 0.6) == depths(gate, 0.6)
    with pytest.raises(LoopedError, match="this hybrid gate was made for"):
        get_gate(tmp_path, micro_ouro(seed=5))


def test_damage(tmp_path: Path) -> None:
    write(hybrid(), tmp_path)
    path = tmp_path / "gate.safetensors"
    tensors = load_file(path)
    for name in tensors:
        save_file({other: x for other, x in tensors.items() if other != name}, path)
        with pytest.raises(LoopedError, match="missing or damaged"):
            load_gate(tmp_path)
        for value in (torch.zeros(3, 3), tensors[name] * torch.nan):
            save_file(tensors | {name: value}, path)
            with pytest.raises(LoopedError, match="do not fit"):
                load_gate(tmp_path)
    save_file(tensors, path)
    card = json.loads((tmp_path / "gate.json").read_text())
    (tmp_path / "gate.json").write_text(json.dumps(card | {"kind": "lookahead"}))
    with pytest.raises(LoopedError, match="missing or damaged"):
        load_gate(tmp_path)


def test_its_name() -> None:
    assert load_gate("hybrid").name == "hybrid"
    with pytest.raises(LoopedError, match="did you mean 'hybrid'"):
        load_gate("hibrid")
    with pytest.raises(LoopedError, match="no hybrid gate ships"):
        get_gate("hybrid", MODEL)


def test_the_shipped_gate_exits_at_every_depth() -> None:
    model = looped.load("tiny-ouro", device="cpu")
    gate = get_gate("hybrid", model)
    assert model.tokenizer is not None and gate.threshold is not None
    prompt = model.tokenizer.encode("Q: Tom has 3 boxes of 12 eggs. He eats 4 eggs. How many eggs are left?\nA:")
    done = generate(model, prompt, gate=gate, max_new_tokens=48)
    assert set(done.depths[1:]) == {1, 2, 3, 4}
    assert "32" in model.tokenizer.decode(done.token_ids)
