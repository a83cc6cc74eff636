"""The schedulers against the four printed traces of continuous depth batching, tables 2 and 3 (W = 64, M = 8192).

A row is (stage, batch size, detail, queues after the stage). The detail of a prefill is its prompt tokens; of a loop,
the rows by loop step and the exits by loop step that the next rows imply. Prompt lengths are chosen so that prompts
complete where the tables say; they are cut freely.
"""

import pytest

from looped.infer.scheduler import Job, Limits, Scheduler, Stage

W, NUM_PROMPTS = 64, 256


def lengths(batch_2, batch_3):
    """20 prompts and a piece in the first 8,192 tokens, then `batch_2`, then `batch_3`; the rest never runs."""
    head = [400] * 20 + [392] + batch_2 + batch_3
    return head + [100] * (NUM_PROMPTS - len(head))


OURO = lengths([250] * 31 + [342], [172] * 10 + [178])
HUGINN = lengths([240] * 32 + [412], [168] * 9 + [173])

# stage, B, detail, exits by step, (Q_R, Q_C, Q_P)
OURO_REFILL = [
    ("prefill", 21, 8192, {}, (0, 0, 235)),
    ("prelude", 20, None, {}, (20, 0, 235)),
    ("prefill", 33, 8192, {}, (20, 0, 203)),
    ("prelude", 32, None, {}, (52, 0, 203)),
    ("prefill", 12, 1998, {}, (52, 0, 192)),
    ("prelude", 12, None, {}, (64, 0, 192)),
    ("core", 64, {1: 64}, {}, (64, 0, 192)),
    ("core", 64, {2: 64}, {2: 1}, (63, 1, 192)),
    ("coda", 1, None, {}, (63, 0, 192)),
    ("prelude", 1, None, {}, (64, 0, 192)),
    ("core", 64, {1: 1, 3: 63}, {3: 29}, (35, 29, 192)),
    ("coda", 29, None, {}, (35, 0, 192)),
    ("prelude", 29, None, {}, (64, 0, 192)),
    ("core", 64, {1: 29, 2: 1, 4: 34}, {2: 1, 4: 34}, (29, 35, 192)),
    ("coda", 35, None, {}, (29, 0, 192)),
    ("prelude", 35, None, {}, (64, 0, 192)),
    ("core", 64, {1: 35, 2: 29}, {2: 9}, (55, 9, 192)),
    ("coda", 9, None, {}, (55, 0, 192)),
    ("prelude", 9, None, {}, (64, 0, 192)),
    ("core", 64, {1: 9, 2: 35, 3: 20}, {2: 1, 3: 20}, (43, 21, 192)),
]

HUGINN_REFILL = [
    ("prefill", 21, 8192, {}, (0, 0, 235)),
    ("prelude", 20, None, {}, (20, 0, 235)),
    ("prefill", 34, 8192, {}, (20, 0, 202)),
    ("prelude", 33, None, {}, (53, 0, 202)),
    ("prefill", 11, 1785, {}, (53, 0, 192)),
    ("prelude", 11, None, {}, (64, 0, 192)),
    *[("core", 64, {step: 64}, {}, (64, 0, 192)) for step in range(1, 7)],
    ("core", 64, {7: 64}, {7: 7}, (57, 7, 192)),
    ("coda", 7, None, {}, (57, 0, 192)),
    ("prelude", 7, None, {}, (64, 0, 192)),
    ("core", 64, {1: 7, 8: 57}, {8: 22}, (42, 22, 192)),
    ("coda", 22, None, {}, (42, 0, 192)),
    ("prelude", 22, None, {}, (64, 0, 192)),
    ("core", 64, {1: 22, 2: 7, 9: 35}, {9: 18}, (46, 18, 192)),
    ("coda", 18, None, {}, (46, 0, 192)),
]

# stage, B, detail, exits by step, (Q_D, Q_P)
OURO_NO_REFILL = [
    ("prefill", 21, 8192, {}, (20, 235)),
    ("prefill", 33, 8192, {}, (52, 203)),
    ("prefill", 12, 1998, {}, (64, 192)),
    ("prelude", 64, None, {}, (0, 192)),
    ("core", 64, {1: 64}, {}, (0, 192)),
    ("core", 64, {2: 64}, {2: 1}, (0, 192)),
    ("core", 63, {3: 63}, {3: 29}, (0, 192)),
    ("core", 34, {4: 34}, {4: 34}, (0, 192)),
    ("coda", 64, None, {}, (64, 192)),
    ("prelude", 64, None, {}, (0, 192)),
    ("core", 64, {1: 64}, {}, (0, 192)),
    ("core", 64, {2: 64}, {2: 13}, (0, 192)),
    ("core", 51, {3: 51}, {3: 39}, (0, 192)),
    ("core", 12, {4: 12}, {4: 12}, (0, 192)),
    ("coda", 64, None, {}, (64, 192)),
    ("prelude", 64, None, {}, (0, 192)),
    ("core", 64, {1: 64}, {}, (0, 192)),
    ("core", 64, {2: 64}, {2: 17}, (0, 192)),
    ("core", 47, {3: 47}, {3: 39}, (0, 192)),
    ("core", 8, {4: 8}, {4: 8}, (0, 192)),
]

OURO_REFILL_K16 = [
    *OURO_REFILL[:8],
    ("core", 63, {3: 63}, {3: 29}, (34, 30, 192)),
    ("coda", 30, None, {}, (34, 0, 192)),
    ("prelude", 30, None, {}, (64, 0, 192)),
    ("core", 64, {1: 30, 4: 34}, {4: 34}, (30, 34, 192)),
    ("coda", 34, None, {}, (30, 0, 192)),
    ("prelude", 34, None, {}, (64, 0, 192)),
    ("core", 64, {1: 34, 2: 30}, {2: 10}, (54, 10, 192)),
    ("core", 54, {2: 34, 3: 20}, {2: 3, 3: 17}, (34, 30, 192)),
    ("coda", 30, None, {}, (34, 0, 192)),
    ("prelude", 30, None, {}, (64, 0, 192)),
    ("core", 64, {1: 30, 3: 31, 4: 3}, {3: 22, 4: 3}, (39, 25, 192)),
    ("coda", 25, None, {}, (39, 0, 192)),
]


def replay(mode, coda_batch, prompts, table):
    """Run the scheduler over `table`'s exits; no sequence ends."""
    scheduler = Scheduler(mode, Limits.of(W, min_coda_batch=coda_batch), trace=[])
    for number, length in enumerate(prompts):
        scheduler.add(Job(str(number), length, length + 1000))
    for _, _, _, exits, _ in table:
        plan = scheduler.next()
        assert plan is not None
        if plan.stage is Stage.PREFILL:
            scheduler.done_prefill(plan)
        elif plan.stage is Stage.PRELUDE:
            scheduler.done_prelude(plan)
        elif plan.stage is Stage.CODA:
            scheduler.done_coda(plan)
        else:
            left = dict(exits)
            out = []
            for slot in plan.slots:
                step = scheduler.active[slot].step + 1
                if left.get(step, 0):
                    left[step] -= 1
                    out.append(slot)
            scheduler.done_core(plan, out)
    return scheduler.trace


@pytest.mark.parametrize(
    ("mode", "coda_batch", "prompts", "table"),
    [
        ("refill", 1, OURO, OURO_REFILL),
        ("refill", 1, HUGINN, HUGINN_REFILL),
        ("no-refill", 1, OURO, OURO_NO_REFILL),
        ("refill", 16, OURO, OURO_REFILL_K16),
    ],
    ids=["ouro-refill", "huginn-refill", "ouro-no-refill", "ouro-refill-K16"],
)
def test_printed_trace(mode, coda_batch, prompts, table):
    assert len(table) == 20
    rows = replay(mode, coda_batch, prompts, table)
    for number, (row, expected) in enumerate(zip(rows, table, strict=True), start=1):
        stage, batch, detail, exits, queues = expected
        got = (row.prelude, row.waiting) if mode == "no-refill" else (row.core, row.coda, row.waiting)
        assert (number, row.stage, row.batch, got) == (number, stage, batch, queues)
        assert row.exits == sum(exits.values())
        if stage == "prefill":
            assert row.prompt_tokens == detail
        if stage == "core":
            assert dict(row.steps) == detail
