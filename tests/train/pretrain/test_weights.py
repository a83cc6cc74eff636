"""What tokens weigh in a loss, the fewest loop steps of a Huginn step, and the mixture of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from looped.data.packing import ANSWER_NUMBER, ANSWER_SIDE, DIRECT
from looped.errors import LoopedError
from looped.model import LoopedLM
from looped.options import parse
from looped.train.pretrain.corpus import open_corpus
from looped.train.pretrain.huginn_loss import HuginnLoss
from looped.train.pretrain.objective import Moment, token_weights, weighted_mean
from looped.train.pretrain.recipe import Data, Objective, Options, Recurrence, check
from looped.train.pretrain.windows import Batch
from tests.models import huginn_config


def _batch(rows: int = 2, length: int = 12) -> Batch:
    tokens = torch.randint(1, 60, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    marks = torch.zeros(rows, length, dtype=torch.uint8)
    marks[:, 6:] = ANSWER_SIDE
    marks[:, 9] = ANSWER_SIDE | ANSWER_NUMBER | DIRECT
    return Batch(tokens[:, :-1], tokens[:, 1:], marks)


def test_weights_of_questions_answers_and_numbers() -> None:
    batch = _batch()
    weights = token_weights(batch, Objective(question_weight=0.5, number_weight=4.0))
    total = 2 * (6 * 0.5 + 5 * 1.0 + 1 * 4.0)
    assert torch.allclose(weights[0], torch.tensor([0.5] * 6 + [1.0] * 3 + [4.0] + [1.0] * 2) / total)
    values = torch.arange(24.0).view(2, 12)
    assert torch.allclose(
        weighted_mean(values, batch, Objective(number_weight=4.0, question_weight=0.5)), (weights * values).sum()
    )
    assert float(weighted_mean(values, batch, Recurrence())) == float(values.mean())


@pytest.mark.parametrize("least", [1, 3])
def test_no_loss_is_taken_after_fewer_steps_than_the_least(least: int) -> None:
    torch.manual_seed(0)
    model = LoopedLM(huginn_config())
    options = Recurrence(mean=2.0, least=least, shallow_weight=0.5)
    loss = HuginnLoss(options, model.config.max_loops)
    seen = set()
    for seed in range(30):
        log = loss(model, _batch(), Moment(0, 0.0, 0.0, seed)).log
        seen |= {int(key[3:]) for key in log if key.startswith("ce_")}
    assert min(seen) == least


def test_a_recipe_says_the_mixture(tmp_path: Path) -> None:
    argv = ["--output", str(tmp_path), "--data.mix.long", "0.5", "--data.mix.words", "0.4", "--data.mix.gsm8k", "0.01"]
    data = parse(Options, argv, "looped train").data
    assert (data.mix.long, data.mix.words, data.mix.gsm8k, data.mix.drills) == (0.5, 0.4, 0.01, 0.22)
    with pytest.raises(LoopedError, match=r"data\.mix\.long"):
        check(parse(Options, ["--data.mix.long", "-1"], "looped train"))


def test_another_mixture_is_another_set(tmp_path: Path) -> None:
    data = Data(folder=tmp_path, tokens=4000, window=128, workers=1, text=())
    open_corpus(data, 0, torch.device("cpu"))
    with pytest.raises(LoopedError, match="another packed data set"):
        changed = parse(Options, ["--data.mix.long", "0.5"], "looped train").data.mix
        open_corpus(
            Data(folder=tmp_path, tokens=4000, window=128, workers=1, text=(), mix=changed), 0, torch.device("cpu")
        )
