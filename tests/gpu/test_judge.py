"""The judge finds what is wrong, and nothing in what is right."""

import pytest
import torch

from looped import generate
from tests.gpu.judge import MARGINS, judge
from tests.gpu.models import gate_case, gpu_model, prompts

pytestmark = pytest.mark.gpu

DTYPE, POLICY = torch.float32, {"layout": "last-exited"}
PROMPT = prompts((9,))[0]


def reference(family, gate, **options):
    case = gate_case(family, DTYPE, 64, gate)
    policy = POLICY | {"gate": case.gate, "threshold": case.threshold}
    made = generate(gpu_model(family, DTYPE), PROMPT, max_new_tokens=16, ignore_eos=True, **policy | options)
    return policy, made


@pytest.mark.parametrize(
    ("family", "gate"),
    [("ouro", "ouro"), ("ouro", "lookahead"), ("huginn", "convergence"), ("huginn", "pre-loop"), ("ouro", "none")],
)
def test_the_reference_is_found_right(family, gate):
    policy, made = reference(family, gate)
    verdict = judge(gpu_model(family, DTYPE), PROMPT, made.token_ids, made.depths, MARGINS[DTYPE], **policy)
    assert not verdict.wrong and verdict.worst < 1e-4
    assert verdict.judged > len(made.token_ids) or gate == "none"
    assert len(set(made.depths[1:])) > 1 or gate == "none"


@pytest.mark.parametrize(("family", "gate"), [("ouro", "ouro"), ("ouro", "lookahead"), ("huginn", "pre-loop")])
def test_wrong_tokens_and_depths_are_found(family, gate):
    policy, made = reference(family, gate)
    model, margin = gpu_model(family, DTYPE), MARGINS[DTYPE]
    tokens = [*made.token_ids[:7], (made.token_ids[7] + 1) % 61, *made.token_ids[8:]]
    assert judge(model, PROMPT, tokens, made.depths, margin, **policy).wrong
    for other in (1, model.config.max_loops):
        at = next(i for i, depth in enumerate(made.depths) if i and depth != other)
        depths = [*made.depths[:at], other, *made.depths[at + 1 :]]
        assert judge(model, PROMPT, made.token_ids, depths, margin, **policy).wrong


def test_another_layout_is_found_wrong():
    policy, made = reference("ouro", "ouro", layout="shared")
    verdict = judge(gpu_model("ouro", DTYPE), PROMPT, made.token_ids, made.depths, MARGINS[DTYPE], **policy)
    assert verdict.wrong
