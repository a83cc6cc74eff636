"""What goes wrong in one request ends that request alone."""

from __future__ import annotations

import collections

import pytest
import torch

from looped import LoopedError, SamplingParams, generate
from looped.infer import Engine, EngineOptions, Output, Request
from looped.infer.scheduler import Stage
from looped.sampling_options import Sampling
from tests.infer.harness import check_books, drain, exits_modes, gate_case, make_engine, prompts, reference
from tests.models import micro_huginn, micro_ouro, random_lookahead

BAD_TOKEN = 60
WAYS = [
    (family, gate, exits, page_size)
    for family, gate in (("ouro", "lookahead"), ("huginn", "delay"))
    for exits in exits_modes(family, gate)
    for page_size in (1, 16)
]


def outputs_of(engine: Engine) -> dict[str, list[Output]]:
    collected = collections.defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            collected[output.key].append(output)
        check_books(engine)
    return dict(collected)


def ask(engine: Engine, number: int, prompt: tuple[int, ...], max_tokens: int = 6, **params: object) -> None:
    wanted = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    engine.add(Request(str(number), prompt, wanted, ordinal=number, stream=False))


@pytest.mark.parametrize(("family", "gate", "exits", "page_size"), WAYS)
@pytest.mark.parametrize("poison", [False, True])
def test_logits_that_are_not_finite_end_their_request_alone(family, gate, exits, page_size, poison):
    """One token's embedding is NaN: in a prompt beside good ones, in a chunk of its own, and in pages used again."""
    make = micro_ouro if family == "ouro" else micro_huginn
    model = make(tie_embeddings=False)
    model.embed.weight.data[BAD_TOKEN] = torch.nan
    good = prompts((5, 17, 9), seed=3)
    good = tuple(tuple(min(token, BAD_TOKEN - 1) for token in prompt) for prompt in good)

    def run(work: list[tuple[int, ...]]) -> dict[str, list[Output]]:
        case = gate_case(family, "none")
        engine = Engine(
            model,
            EngineOptions(
                kv="last-exited", gate=case.gate, exits=exits, max_num_seqs=2, page_size=page_size, poison=poison,
                max_num_batched_tokens=12, preemption="off",
            ),
        )  # fmt: skip
        for number, prompt in enumerate(work):
            ask(engine, number, prompt)
        return outputs_of(engine)

    alone = run(list(good))
    bad = (1, 2, BAD_TOKEN, 4)
    mixed = run([good[0], bad, good[1], (BAD_TOKEN,) * 14, good[2]])
    for number in ("1", "3"):
        (output,) = mixed[number]
        assert output.token is None and output.finish_reason == "error"
    for mine, theirs in (("0", "0"), ("2", "1"), ("4", "2")):
        assert [o.token for o in mixed[mine]] == [o.token for o in alone[theirs]]
        assert mixed[mine][-1].finish_reason == "length"


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("layout", ["ragged", "last-exited", "shared"])
@pytest.mark.parametrize("mode", ["refill", "no-refill", "cb"])
def test_a_decode_pass_that_is_not_finite_ends_its_request_alone(mode, layout, exits):
    """A request is made to generate the token whose embedding is NaN, in batches with others that go on."""
    model = micro_ouro()
    model.embed.weight.data[BAD_TOKEN] = torch.nan
    gate, threshold = random_lookahead(model), 0.5
    options = EngineOptions(
        mode=mode, kv=layout, gate=gate, threshold=threshold, exits=exits, max_num_seqs=3, chunk_size=8,
        page_size=None if layout == "ragged" else 4, num_pages=800, min_coda_batch=2, prefix_caching=True,
    )  # fmt: skip
    engine = Engine(model, options)
    engine.kv.core.data.zero_()
    work = prompts((5, 17, 9, 20), seed=3)
    work = tuple(tuple(min(token, BAD_TOKEN - 1) for token in prompt) for prompt in work)
    for number, prompt in enumerate(work):
        ask(engine, number, prompt, logit_bias={BAD_TOKEN: -1000.0})
        ask(engine, 10 + number, prompt, logit_bias={BAD_TOKEN: 1000.0})
    outputs = outputs_of(engine)
    for number, prompt in enumerate(work):
        bad = outputs[str(10 + number)]
        assert [(o.token, o.finish_reason) for o in bad] == [(BAD_TOKEN, None), (None, "error")]
        expected = generate(
            model, prompt, layout=layout, gate=None if mode == "cb" else gate,
            threshold=None if mode == "cb" else threshold, chunk_size=8 if layout == "shared" else None,
            max_new_tokens=6, ignore_eos=True, sampling=Sampling(temperature=0.0, logit_bias={BAD_TOKEN: -1000.0}),
        )  # fmt: skip
        made = outputs[str(number)]
        assert ([o.token for o in made], [o.depth for o in made]) == (expected.token_ids, expected.depths)
    assert torch.isfinite(engine.kv.core.data).all()


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
def test_an_error_in_one_request_s_text_ends_it_alone(exits):
    engine = make_engine("ouro", "refill", "ragged", "lookahead", exits=exits)
    for number, prompt in enumerate(prompts()[:3]):
        ask(engine, number, prompt)

    class Broken:
        stopped = False

        def push(self, token: int) -> str:
            raise ValueError("broken text")

    engine._sequences["1"].detokenizer = Broken()  # type: ignore[assignment]
    outputs = drain(engine)
    assert [o.finish_reason for o in outputs["1"]] == ["error"]
    assert len(outputs["0"]) == len(outputs["2"]) == 6


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("stage", ["prelude", "core", "coda"])
def test_a_stage_that_raises_ends_its_batch_and_nothing_else(monkeypatch, exits, stage):
    """Every request is reported once, all slots and pages are free, and the next requests run."""
    engine = make_engine("ouro", "refill", "ragged", "lookahead", exits=exits)
    for number, prompt in enumerate(prompts()[:3]):
        ask(engine, number, prompt)
    outputs = collections.defaultdict(list)
    while not engine.stats.stages[Stage.CORE].batches:
        for output in engine.step():
            outputs[output.key].append(output)

    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise RuntimeError("broken kernel")

        patch.setattr(engine.runner.stages, stage, broken)
        with pytest.raises(RuntimeError, match="broken kernel"):
            while engine.has_work:
                for output in engine.step():
                    outputs[output.key].append(output)
    for key, made in drain(engine).items():
        outputs[key] += made
    assert sorted(outputs) == ["0", "1", "2"]
    for made in outputs.values():
        assert sum(output.finished for output in made) == 1 and made[-1].finished
    assert any(made[-1].finish_reason == "error" for made in outputs.values())
    ask(engine, 7, prompts()[0])
    assert len(drain(engine)["7"]) == 6


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("mix", [False, True])
def test_a_prefill_that_raises_ends_its_prompts_and_nothing_else(monkeypatch, exits, mix):
    if mix and exits == "device":
        pytest.skip("refused together")
    options = {"exits": exits, "mix_prefill": mix, "max_num_batched_tokens": 20, "chunk_size": 8, "min_free_slots": 1}
    engine = make_engine("ouro", "refill", "ragged", "lookahead", **options)
    ask(engine, 0, prompts()[0], max_tokens=9)
    outputs = collections.defaultdict(list)
    while not outputs:
        for output in engine.step():
            outputs[output.key].append(output)
    for number, prompt in enumerate(prompts()[1:3], start=1):
        ask(engine, number, prompt)
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise RuntimeError("broken kernel")

        prompt_runs = engine.runner.prompts
        patch.setattr(*((prompt_runs, "finish") if mix else (prompt_runs.dense, "_first_tokens")), broken)
        with pytest.raises(RuntimeError, match="broken kernel"):
            while engine.has_work:
                for output in engine.step():
                    outputs[output.key].append(output)
                check_books(engine)
    ask(engine, 7, prompts()[1])
    for key, made in drain(engine).items():
        outputs[key] += made
    assert [output.finish_reason for output in outputs["1"]] == ["error"]
    assert len(outputs["0"]) == 9 and len(outputs["7"]) == 6
    expected = reference("ouro", "ragged", "lookahead", prompts()[1], 6)[0]
    assert [output.token for output in outputs["7"]] == expected
    assert all(sum(output.finished for output in made) == 1 for made in outputs.values())


def test_sequences_that_end_in_a_failing_step_are_reported_once_and_freed(monkeypatch):
    engine = make_engine("ouro", max_num_seqs=2, exits="sync")
    for number, prompt in enumerate(prompts()):
        ask(engine, number, prompt, max_tokens=1 if number % 2 else 6)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "done_prefill", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    outputs = drain(engine)
    reasons = [[output.finish_reason for output in outputs[str(number)]] for number in range(5)]
    # Its only token was read before the step failed.
    assert reasons[1] == ["length"] and reasons[0][-1] == "error" and len(reasons[0]) <= 2
    assert all(reason[-1] == "length" for reason in reasons[2:])


def test_memory_that_does_not_suffice_says_what_to_lower(monkeypatch):
    with pytest.raises(LoopedError, match="num_pages must be at most"):
        make_engine("ouro", num_pages=1 << 42)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("looped.infer.runner.DeviceState", full)
    with pytest.raises(LoopedError, match="lower num_pages or max_num_seqs"):
        make_engine("ouro")


def test_what_can_never_fit_is_refused_at_once():
    engine = make_engine("ouro", layout="last-exited", page_size=4, num_pages=40)
    with pytest.raises(LoopedError, match="do not fit into a KV pool of 40 tokens"):
        ask(engine, 0, prompts()[3], max_tokens=9)
    assert not engine.has_work
