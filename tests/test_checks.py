"""Values of the wrong type, through the Python API: one sentence, never a guess at what was meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from looped import LLM, SamplingParams, generate, load
from looped.checks import token_ids
from looped.errors import LoopedError
from tests.models import micro_ouro

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize(
    "prompt", [np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)], (1, 2), iter([1, 2])]
)
def test_token_ids_of_any_library(prompt: Any) -> None:
    assert token_ids("the prompt", prompt) == [1, 2]


@pytest.mark.parametrize("prompt", ["12", ["1"], [1.5], [[1, 2]], None, 5, [None], torch.tensor([1.0])], ids=repr)
def test_what_is_no_list_of_token_ids(prompt: Any) -> None:
    with pytest.raises(LoopedError, match="sequence of whole numbers"):
        generate(micro_ouro(), prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": "2"},
        {"depth": True},
        {"min_depth": 1.5, "gate": "ouro"},
        {"threshold": "x", "gate": "ouro"},
        {"compute": None},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": None},
        {"temperature": "hot"},
        {"chunk_size": "4"},
        {"seed": 1.5},
        {"seed": None},
    ],
    ids=repr,
)
def test_options_of_generate(options: dict[str, Any]) -> None:
    with pytest.raises(LoopedError, match=next(iter(options))):
        generate(micro_ouro(), [1, 2], **options)


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": "3"}, {"num_pages": 9.5}, {"kv_headroom": "x"}, {"seed": None}, {"mode": None}, {"depth": "2"}],
    ids=repr,
)
def test_options_of_llm(options: dict[str, Any]) -> None:
    with pytest.raises(LoopedError, match=next(iter(options))):
        LLM(micro_ouro(), **options)


@pytest.mark.parametrize(
    "params",
    [{"temperature": None}, {"max_tokens": 1.5}, {"seed": "x"}, {"stop": [3]}, {"stop": 3}, {"stop_token_ids": "x"}],
    ids=repr,
)
def test_sampling_params(params: dict[str, Any]) -> None:
    with pytest.raises(LoopedError, match=next(iter(params))):
        SamplingParams(**params)


def test_prompts_of_llm() -> None:
    llm = LLM(micro_ouro(), max_num_seqs=2)
    lists = llm.generate([[1, 2], [3, 4]], GREEDY)
    assert [done.token_ids for done in llm.generate(torch.tensor([[1, 2], [3, 4]]), GREEDY)] == [  # type: ignore[arg-type]
        done.token_ids for done in lists
    ]
    assert llm.generate(np.array([1, 2]), GREEDY)[0].token_ids == lists[0].token_ids  # type: ignore[arg-type]
    for prompts, params in ((None, GREEDY), ([None], GREEDY), ([[1.5]], GREEDY), ([[1]], "x"), ([[1]], [{}])):
        with pytest.raises(LoopedError):
            llm.generate(prompts, params)  # type: ignore[arg-type]


def test_load_and_logits() -> None:
    for options in ({"dtype": None}, {"dtype": torch.int8}, {"max_loops": "3"}, {"max_loops": 1.5}):
        with pytest.raises(LoopedError, match=next(iter(options))):
            load("tiny-ouro", **options)  # type: ignore[arg-type]
    for ids in ([[1, 2]], torch.ones(1, 2), torch.tensor([[61]]), torch.tensor([[-1]]), torch.zeros(1, 0).long()):
        with pytest.raises(LoopedError):
            micro_ouro().logits(ids)  # type: ignore[arg-type]


HUGE = 10**5000  # more digits than Python writes out


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", HUGE), ("n", HUGE), ("max_tokens", -HUGE), ("min_tokens", HUGE), ("temperature", HUGE)],
    ids=["seed", "n", "max_tokens", "min_tokens", "temperature"],
)
def test_huge_values_are_refused_in_a_short_sentence(name: str, value: int) -> None:
    with pytest.raises(LoopedError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
    with pytest.raises(LoopedError) as caught:
        LLM(micro_ouro(), num_pages=10**400)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y", "x" * 200 + "/" + "y" * 3000], ids=["long", "null", "deep"])
def test_names_that_no_file_can_have(name: str) -> None:
    for options in ({"gate": name}, {"mode": name}, {"kv": name}, {"backend": name}):
        with pytest.raises(LoopedError) as caught:
            LLM(micro_ouro(), **options)
        assert len(str(caught.value)) < 600
    with pytest.raises(LoopedError):
        load(name if "/" not in name else "/" + name)
    with pytest.raises(LoopedError, match="gate"):
        LLM(micro_ouro(), gate="fixed-" + "9" * 5000)
