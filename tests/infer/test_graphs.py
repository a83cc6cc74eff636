"""CUDA graphs where there is no GPU: sizes, and stages that simply run. Replays are tested in tests/gpu."""

import itertools

import pytest
import torch

from looped.errors import LoopedError
from looped.infer.graphs import Graphs, bucket_sizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 33, 64, 65, 256, 300, 1024])
def test_buckets_rise_to_the_largest_batch(max_rows):
    sizes = bucket_sizes(max_rows)
    assert sizes[0] == 1 and sizes[-1] == max_rows
    assert list(sizes) == sorted(set(sizes))
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(steps, default=0) <= 32


@pytest.mark.parametrize(("device", "enabled"), [(CPU, True), (CPU, False), (CUDA, False)])
def test_without_graphs_stages_run(device, enabled):
    graphs = Graphs(device, enabled, 64)
    ran = []

    def stage():
        ran.append(1)
        return (torch.tensor(len(ran)),)

    graphs.capture("core", stage)
    assert not ran and len(graphs) == 0 and "core" not in graphs
    assert [int(graphs.run("core", stage)[0]) for _ in range(2)] == [1, 2]
    assert graphs.describe() == "off"


def test_out_of_memory_while_capturing_says_what_to_lower(monkeypatch):
    graphs = Graphs(CUDA, True, 64)

    def exhausted(*_):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise RuntimeError("the capture was invalidated")  # noqa: B904  (as closing a broken capture does)

    monkeypatch.setattr(graphs, "_record", exhausted)
    with pytest.raises(
        LoopedError, match=r"batches of up to 64\): lower max_num_seqs or num_pages, or turn graphs off"
    ):
        graphs.capture("core", tuple)


def test_other_errors_while_capturing_stay_what_they_are(monkeypatch):
    graphs = Graphs(CUDA, True, 4)

    def broken(*_):
        raise RuntimeError("a kernel is wrong")

    monkeypatch.setattr(graphs, "_record", broken)
    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        graphs.capture("core", tuple)
    assert "core" not in graphs
