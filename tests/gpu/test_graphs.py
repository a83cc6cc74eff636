"""CUDA graphs: replays do what the stage does, share memory, and take outputs that stay where they are."""

import gc

import pytest
import torch

from looped.errors import LoopedError
from looped.infer.graphs import Graphs

pytestmark = pytest.mark.gpu


def make(max_rows=8):
    return Graphs(torch.device("cuda"), True, max_rows)


def test_replays_follow_their_inputs():
    graphs = make()
    state = torch.zeros(9, 4, device="cuda")
    slots = torch.zeros(8, dtype=torch.long, device="cuda")
    weight = torch.randn(4, 4, device="cuda")

    def stage(rows):
        at = slots[:rows]
        h = state[at] @ weight + 1
        state[at] = h
        return h, h.sum(-1)

    for rows in reversed(graphs.buckets):
        graphs.capture(("core", rows), lambda rows=rows: stage(rows))
    assert len(graphs) == len(graphs.buckets) == 4
    for chosen in ([3, 5, 1], [2], [1, 2, 3, 4, 5, 6, 7, 8]):
        rows = next(size for size in graphs.buckets if size >= len(chosen))
        slots.copy_(torch.tensor([*chosen, *[0] * (8 - len(chosen))], device="cuda"))
        before = state.clone()
        h, total = graphs.run(("core", rows), lambda: pytest.fail("a captured stage ran eagerly"))
        real = torch.tensor(chosen, device="cuda")
        wanted = before[real] @ weight + 1
        torch.testing.assert_close(h[: len(chosen)], wanted)
        torch.testing.assert_close(total[: len(chosen)], wanted.sum(-1))
        torch.testing.assert_close(state[real], wanted)
    text = graphs.describe()
    assert text.startswith("4 captured in ") and text.endswith("for batches padded to 1, 2, 4, 8")


def test_outputs_survive_replays_of_other_keys():
    graphs = make()
    x = torch.arange(8.0, device="cuda")
    for rows in (8, 4):
        graphs.capture(rows, lambda rows=rows: ((x[:rows] * 2) * 3 + 1,))
    first = graphs.run(8, tuple)[0]
    kept = first.clone()
    graphs.run(4, tuple)
    assert torch.equal(first, kept)
    assert graphs.run(8, tuple)[0] is first


def test_what_was_not_captured_runs():
    graphs = make()
    assert graphs.run("other", lambda: (torch.ones(1, device="cuda"),))[0].item() == 1


def test_a_stage_that_waits_for_the_device_cannot_be_captured():
    graphs = make()
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="capture"):
        graphs.capture("waits", lambda: (x * x.item(),))
    assert "waits" not in graphs
    torch.cuda.synchronize()
    graphs.capture("waits", lambda: (x * 2,))
    assert graphs.run("waits", tuple)[0].item() == 2


def test_too_little_memory_is_said():
    graphs = make()
    free = torch.cuda.mem_get_info()[0]

    def stage():
        return (torch.empty(2 * free, dtype=torch.uint8, device="cuda"),)

    with pytest.raises(LoopedError, match="lower max_num_seqs or num_pages, or turn graphs off"):
        graphs.capture("huge", stage)
    gc.collect()
    assert torch.ones(1, device="cuda").item() == 1


def test_the_collector_rests_while_capturing():
    seen = []
    graphs = make()
    graphs.capture("core", lambda: seen.append(gc.get_freeze_count()) or (torch.ones(1, device="cuda"),))
    assert all(seen) and gc.get_freeze_count() == 0
