"""Golden outputs of the official Ouro and Huginn code on tiny random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from looped.decode import PrefillSchedule, generate
from looped.model import LoopedLM, load
from tests.models import fixture_folder

Golden = tuple[LoopedLM, dict[str, Any]]


def load_golden(name: str, shared: Callable[[str], Path], out: Path) -> Golden:
    folder, golden = fixture_folder(shared(f"fixtures/{name}.json").parent.parent, name, out)
    return load(folder, device="cpu"), golden


@pytest.fixture(scope="module")
def ouro(shared: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return load_golden("ouro_tiny", shared, tmp_path_factory.mktemp("ouro_tiny"))


@pytest.fixture(scope="module")
def huginn(shared: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return load_golden("huginn_tiny", shared, tmp_path_factory.mktemp("huginn_tiny"))


def close(found: torch.Tensor, wanted: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, torch.tensor(wanted).reshape(found.shape), atol=tolerance, rtol=0)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_ouro_logits_by_depth(ouro: Golden, depth: int) -> None:
    model, golden = ouro
    last = model.logits(torch.tensor(golden["input_ids"]), depth=depth)[:, -1]
    close(last, golden["logits_last_token_by_exit_step"][depth - 1])
    if depth < 4:
        close(last, golden[f"logits_last_token_total_ut_steps_{depth}"])
    else:
        close(last, golden["logits_default_last_token"])


def test_ouro_sum_of_all_logits(ouro: Golden) -> None:
    model, golden = ouro
    total = model.logits(torch.tensor(golden["input_ids"])).double().sum()
    assert abs(float(total) - golden["logits_full_step4_sum"]) < 1e-3  # 1,818 logits, each within 1e-6


def exit_distribution(model: LoopedLM, ids: torch.Tensor) -> torch.Tensor:
    """pi(r) of every token: [B, T, R]."""
    assert model.exit_gate is not None
    hazards = torch.stack([torch.sigmoid(model.exit_gate(z)[..., 0]) for z in model.states(ids)], -1)
    survival = (1 - hazards).cumprod(-1)
    before = torch.cat((torch.ones_like(survival[..., :1]), survival[..., :-1]), -1)
    pdf = before * hazards
    pdf[..., -1] = before[..., -1]
    return pdf


def test_ouro_gate(ouro: Golden) -> None:
    model, golden = ouro
    ids = torch.tensor(golden["input_ids"])
    assert model.exit_gate is not None
    found = torch.stack([model.exit_gate(z)[..., 0] for z in model.states(ids)])
    close(found, golden["gate_logits"])
    close(exit_distribution(model, ids), golden["exit_pdf"])


@pytest.mark.parametrize("threshold", ["0.2", "0.4", "0.6", "0.8", "0.95"])
def test_ouro_q_exit(ouro: Golden, threshold: str) -> None:
    """The exit step of every prompt token, and the logits of the last, by the decoder with `compute="dense"`."""
    model, golden = ouro
    wanted = golden["threshold"][threshold]
    ids = torch.tensor(golden["input_ids"])
    logits = torch.stack([model.logits(ids, depth=depth)[:, -1] for depth in (1, 2, 3, 4)])
    for row, prompt in enumerate(golden["input_ids"]):
        for length in range(1, len(prompt) + 1):
            made = generate(
                model,
                prompt[:length],
                layout="depth",
                gate="ouro",
                threshold=float(threshold),
                compute="dense",
                prefill="ragged",
                max_new_tokens=1,
            )
            assert made.depths[0] - 1 == wanted["exit_step_index"][row][length - 1]
        close(logits[made.depths[0] - 1, row], wanted["last_token_logits"][row])
        assert made.token_ids[0] == int(torch.tensor(wanted["last_token_logits"][row]).argmax())


def test_ouro_expected_logits_loss(ouro: Golden) -> None:
    """The official loss for labels = ids: cross-entropy of the logits averaged over the exit distribution."""
    model, golden = ouro
    ids = torch.tensor(golden["input_ids"])
    pdf = exit_distribution(model, ids)
    logits = torch.stack([model.logits(ids, depth=depth) for depth in (1, 2, 3, 4)], -2)
    mixed = (pdf[..., None] * logits).sum(-2)
    loss = torch.nn.functional.cross_entropy(mixed[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(float(loss) - golden["loss_labels_eq_ids"]) < 1e-4


@pytest.mark.parametrize("layout", ["depth", "ragged", "last-exited"])
def test_ouro_greedy(ouro: Golden, layout: str) -> None:
    model, golden = ouro
    made = generate(model, golden["input_ids"][0], layout=layout, max_new_tokens=12, ignore_eos=True)
    assert made.token_ids == golden["greedy12_row0"] == golden["greedy12_row0_cached"]
    assert made.depths == [4] * 12


@pytest.mark.parametrize("prefill", ["dense", "ragged"])
def test_ouro_greedy_with_q_exit(ouro: Golden, prefill: str) -> None:
    model, golden = ouro
    made = generate(
        model,
        golden["input_ids"][0],
        layout="depth",
        gate="ouro",
        threshold=0.6,
        compute="dense",
        prefill=prefill,
        max_new_tokens=12,
        ignore_eos=True,
    )
    assert made.token_ids == golden["greedy12_row0_threshold0.6"]


@pytest.mark.parametrize(("depth", "tolerance"), [(1, 1e-4), (2, 1e-4), (4, 1e-4), (8, 5e-4)])
def test_huginn_logits(huginn: Golden, depth: int, tolerance: float) -> None:
    model, golden = huginn
    last = model.logits(torch.tensor(golden["input_ids"]), depth=depth, state="zeros")[:, -1]
    close(last, golden[f"logits_last_zero_init_steps{depth}"], tolerance)


def test_huginn_given_state(huginn: Golden) -> None:
    model, golden = huginn
    ids, state = torch.tensor(golden["input_ids"]), torch.tensor(golden["input_states"])
    logits = model.logits(ids, depth=4, state=state)
    close(logits[:, -1], golden["logits_last_given_state_steps4"])
    latents = model.norm(model.states(ids, depth=4, state=state)[-1])
    assert abs(float(latents.sum()) - golden["latents_given_state_steps4_sum"]) < 1e-3


@pytest.mark.parametrize(
    ("layout", "lookup"),
    [
        ("last-exited", "latest-m4"),
        ("ragged", "latest-m4"),
        ("shared", "latest-m4-compress-s4"),
        ("modulo-2", "latest-m4-compress-s8"),
        ("modulo-4", "latest-m4-compress-s16"),
    ],
)
def test_huginn_greedy_by_layout(huginn: Golden, layout: str, lookup: str) -> None:
    model, golden = huginn
    made = generate(model, golden["input_ids"][0], layout=layout, max_new_tokens=10, ignore_eos=True, state="zeros")
    assert made.token_ids == golden["greedy10_by_lookup"][lookup]


# The official criteria and the thresholds that were run.
ADAPTIVE = {
    "latent-diff": ("0.03", "0.6", "0.9", "0.95", "1.2"),
    "entropy-diff": ("0.001", "0.05"),
    "kl": ("0.001", "0.05"),
    "minp-kl": ("1e-05", "0.05"),
    "argmax-stability": ("5", "2"),
    "cosine": ("0.001", "0.05"),
}


@pytest.mark.parametrize(("criterion", "threshold"), [(name, q) for name, qs in ADAPTIVE.items() for q in qs])
def test_huginn_adaptive(huginn: Golden, criterion: str, threshold: str) -> None:
    """Every adaptive run under a look-up that is a layout of ours. There the prompt leaves too, as one block."""
    model, golden = huginn
    wanted = golden["adaptive"][f"{criterion}|{threshold}|latest-m4"]
    made = generate(
        model,
        golden["input_ids"][0],
        layout="last-exited",
        gate="convergence" if criterion == "latent-diff" else criterion,
        threshold=float(threshold),
        min_depth=1,
        prefill="ragged",
        prefill_threshold=PrefillSchedule(float(threshold), block=True),
        max_new_tokens=10,
        ignore_eos=True,
        state="zeros",
    )
    assert made.token_ids == wanted["tokens"]
    assert made.depths == wanted["steps_run"]


def test_huginn_adaptive_covers_the_fixture(huginn: Golden) -> None:
    runs = {key.rsplit("|", 1)[0] for key in huginn[1]["adaptive"]}
    assert runs == {f"{name}|{q}" for name, qs in ADAPTIVE.items() for q in qs}
