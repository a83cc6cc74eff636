"""Criteria on logits in captured core steps, which run the coda for them: with coda layers and without."""

import pytest
import torch

from looped.gates import load_gate
from tests.gpu.models import gpu_model, prompts
from tests.gpu.test_equality import check, greedy, run

pytestmark = pytest.mark.gpu

THRESHOLDS = {"cosine": 0.3, "entropy-diff": 0.1, "kl": 0.5, "minp-kl": 0.2, "argmax-stability": 1, "delayed-kl": 1.0}
WORK = prompts((1, 15, 33, 64))


@pytest.mark.parametrize("family", ["ouro", "huginn"])
@pytest.mark.parametrize("gate", THRESHOLDS)
@pytest.mark.parametrize(("exits", "graphs"), [("sync", True), ("device", True), ("device", False)])
def test_engine_equals_reference(family, gate, exits, graphs):
    dtype = torch.float32
    model = gpu_model(family, dtype)
    policy = {"gate": load_gate(gate), "threshold": THRESHOLDS[gate]}
    made, _ = run(
        model, greedy(), WORK, kv="last-exited", exits=exits, graphs=graphs, backend="triton", max_num_seqs=3, **policy
    )
    check(model, WORK, made, dtype, layout="last-exited", **policy)
    assert len({depth for _, depths in made for depth in depths[1:]}) > 1
