"""Dense prefills: their sizes, and that padding, ways of attention and cuts change no token."""

import itertools

import pytest

from looped import SamplingParams
from looped.infer import Request
from looped.infer.backends import Piece
from looped.infer.dense import Work, prompt_sizes
from looped.infer.prompts import PromptPiece
from tests.infer.harness import drain, make_engine, prompts, reference

# One token; around sizes of 16, 32 and 64 rows.
LENS = (1, 16, 17, 31, 33, 63, 8)


@pytest.mark.parametrize("most", [1, 10, 16, 17, 700, 8192, 8193, 100_000])
def test_sizes_rise_to_the_largest_batch_and_waste_little(most):
    sizes = prompt_sizes(most)
    assert sizes[-1] == min(most, 8192) and list(sizes) == sorted(set(sizes))
    assert all(after <= 1.5 * before + 1 for before, after in itertools.pairwise(sizes) if before >= 128)


def test_padding_is_one_piece_with_one_key():
    work = Work.of([PromptPiece(3, 2, [7, 8, 9], 9, None, True), PromptPiece(1, 0, [5], 4, None, False)])
    assert work.rows_3N.tolist() == [[3, 3, 3, 1], [2, 3, 4, 0], [7, 8, 9, 5]]
    assert work.ends_3A.tolist() == [[2], [3], [4]]
    assert work.pieces == (Piece(3, 0, 3, 2, 5), Piece(1, 3, 4, 0, 1))
    assert work.num_keys == 3 * 5 + 1
    padded = work.padded(16)
    assert padded.rows_3N.shape == (3, 16) and not padded.rows_3N[:, 4:].any()
    assert padded.pieces == (*work.pieces, Piece(0, 4, 16, 0, 1))
    assert work.padded(4).pieces == work.pieces


def launches(engine):
    """Keys of all prompt launches from now on."""
    seen, launch = [], engine.runner.stages.launch

    def noting(key, *rest):
        seen.append(key)
        return launch(key, *rest)

    engine.runner.stages.launch = noting
    return seen


def outputs(engine, work, max_tokens=3):
    for number, prompt in enumerate(work):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add(Request(str(number), prompt, params, ordinal=number))
    made = drain(engine)
    return [[o.token for o in made[str(number)]] for number in range(len(work))]


@pytest.mark.parametrize("by_rows", [0, 32, 512])
@pytest.mark.parametrize("layout", ["last-exited", "ragged", "shared", "first-shared"])
@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_padded_prefills_equal_the_reference(monkeypatch, family, layout, by_rows):
    """In float64, exactly: packed pieces and rows, chunks behind a past, batches of every size with padding or none."""
    chunk = 16 if layout in ("shared", "first-shared") else None
    options = {"chunk_size": chunk or 23, "max_num_batched_tokens": 80, "max_num_seqs": 3, "min_free_slots": 1}
    engine = make_engine(family, "refill", layout, pad_batches=True, exits="device", **options)
    monkeypatch.setattr(type(engine.runner.backend.backend), "by_rows", by_rows)
    seen = launches(engine)
    work = prompts(LENS)
    made = outputs(engine, work)
    expected = [reference(family, layout, "none", prompt, 3, chunk_size=chunk)[0] for prompt in work]
    assert made == expected
    bodies = {key[1:] for key in seen if key[0] == "prompts"}
    assert {size for _, size in bodies} <= {16, 32, 64, 80} and len(bodies) > 2
    assert {kind for kind, _ in bodies} == {0: {"packed"}, 32: {"packed", "by rows"}, 512: {"by rows"}}[by_rows]


def test_a_backend_that_cannot_pad_runs_batches_as_they_are(monkeypatch):
    engine = make_engine("ouro", "refill", "ragged", pad_batches=True, exits="device")
    kind = type(engine.runner.backend.backend)
    monkeypatch.setattr(kind, "pads_prefill", False)
    monkeypatch.setattr(kind, "by_rows", 16)
    seen = launches(engine)
    work = prompts((40, 9, 12))
    assert outputs(engine, work[:1]) + outputs(engine, work[1:2]) == [
        reference("ouro", "ragged", "none", prompt, 3)[0] for prompt in work[:2]
    ]
    assert [key for key in seen if "prompts" in key[0]] == [("loose prompts", "packed", 40), ("prompts", "by rows", 16)]


def test_a_prompt_longer_than_the_largest_size_is_not_padded():
    """Layouts that are never cut may have such a batch."""
    engine = make_engine("ouro", "refill", "shared", pad_batches=True, exits="device", max_num_batched_tokens=32)
    seen = launches(engine)
    work = prompts((50, 20))
    assert outputs(engine, work) == [reference("ouro", "shared", "none", prompt, 3)[0] for prompt in work]
    assert {key for key in seen if "prompts" in key[0]} == {("loose prompts", "packed", 50), ("prompts", "by rows", 32)}


def test_first_tokens_at_every_level_and_number_of_prompts():
    """What other prompts of the batch ask for, and what was left from larger batches, changes nothing."""
    engine = make_engine("ouro", "refill", "ragged", pad_batches=True, exits="device", max_num_seqs=6)
    assert engine.runner.prompts.dense.counts == (1, 4, 6)
    seen = launches(engine)
    work = prompts((9, 5, 7, 3, 8, 4))
    for number in (6, 2, 5, 1):
        params = [SamplingParams(temperature=0.7 * (i % 2), top_p=0.9, seed=i, max_tokens=1) for i in range(number)]
        params[-1] = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 if number == 5 else None)
        for i, each in enumerate(params):
            engine.add(Request(str(i), work[i], each, ordinal=i))
        made = drain(engine)
        alone = []
        for i, each in enumerate(params):
            engine.add(Request("alone", work[i], each, ordinal=i))
            alone.append(drain(engine)["alone"][0].token)
        assert [made[str(i)][0].token for i in range(number)] == alone
    assert {key[-1] for key in seen if key[0].startswith("first tokens")} == {1, 4, 6}
