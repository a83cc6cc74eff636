"""The batched decoder of the quick answer check against full forwards."""

from __future__ import annotations

import pytest

from looped.decode import generate
from looped.train.pretrain.accuracy import answer_of, greedy
from looped.train.pretrain.build import new_model
from looped.train.pretrain.recipe import Init, Shape, model_config

PROMPTS = [[5, 9, 3], [7, 2, 8, 4, 11, 6], [3]]


@pytest.mark.parametrize(("family", "layers"), [("ouro", (0, 2, 0)), ("huginn", (1, 1, 1))])
@pytest.mark.parametrize(("depth", "layout"), [(3, "depth"), (2, "depth"), (3, "shared")])
def test_batched_greedy_is_the_reference_decoder(
    family: str, layers: tuple[int, int, int], depth: int, layout: str
) -> None:
    shape = Shape(family, 16, 24, 2, layers, 3)  # type: ignore[arg-type]
    init = Init(embed_std=1.0, linear_std=0.3, head_std=0.3, branch_gain=0.5)
    model = new_model(model_config(shape, 32, 64, None, 1), init, seed=5).double().eval()
    batch = greedy(model, PROMPTS, depth, 8, layout)
    for prompt, new in zip(PROMPTS, batch, strict=True):
        alone = generate(model, prompt, layout=layout, depth=depth, max_new_tokens=8, ignore_eos=True)
        assert new == list(alone.token_ids)


def test_answers_are_read_from_the_first_document() -> None:
    assert answer_of(" 3 + 4 = 7. The answer is 7.") == "7"
    assert answer_of(" The answer is 1,200.\n\nQ: More? A: The answer is 3.") == "1200"
    assert answer_of(" I do not know.\n\nQ: a\nA: The answer is 3.") is None
