"""GSM8K, the generator's documents, and the lm-eval tasks."""

import itertools

import pytest

from looped.data.embedded import embedded_documents
from looped.data.evalsets import eval_items
from looped.data.exemplars import exemplars, prefix
from looped.data.gsm8k import gsm8k_train, solved


def test_solved_strips_calculator_marks():
    item = solved("How many?\n Say.", "He has 2*3=<<2*3=6>>6 apples\nand 1,000 <<6+994=1000>>pears.\n#### 1,000")
    assert item.document() == "Q: How many? Say.\nA: He has 2*3=6 apples and 1,000 pears. The answer is 1000."


def test_gsm8k_train_file(gsm8k_folder):
    problems = gsm8k_train(str(gsm8k_folder / "train.jsonl"))
    assert len(problems) == 7473
    assert all(p.answer.lstrip("-").isdigit() for p in problems)
    assert not any(
        "<<" in p.chain or "####" in p.chain or "\n" in p.document()[len(p.question) + 6 :] for p in problems
    )


def test_tasks_equal_gsm8k_cot(repository):
    lm_eval = pytest.importorskip("lm_eval")
    import importlib.resources

    yaml = pytest.importorskip("yaml")
    path = importlib.resources.files(lm_eval) / "tasks" / "gsm8k" / "gsm8k-cot.yaml"
    theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [e._asdict() for e in exemplars()] == theirs["fewshot_config"]["samples"]
    ours = yaml.safe_load((repository / "eval" / "wordmath" / "_wordmath_common").read_text(encoding="utf-8"))
    for key in (
        "doc_to_text",
        "doc_to_target",
        "fewshot_config",
        "metric_list",
        "output_type",
        "test_split",
        "repeats",
    ):
        assert ours[key] == theirs[key], key
    assert ours["generation_kwargs"]["until"] == theirs["generation_kwargs"]["until"]
    filters = {f["name"]: f["filter"] for f in theirs["filter_list"]}
    assert {f["name"]: f["filter"] for f in ours["filter_list"]} == filters


def test_generated_documents_are_a_function_of_their_seed():
    first = list(itertools.islice(embedded_documents(1), 20))
    assert first == list(itertools.islice(embedded_documents(1), 20))
    assert all(d.startswith("Q: ") and d.endswith(".") for d in first)


@pytest.fixture
def lm_eval_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return pytest.importorskip("lm_eval")


def _answering(lm_eval, replies):
    from lm_eval.api.model import LM

    class Replies(LM):
        def loglikelihood(self, requests):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

        def generate_until(self, requests):
            self.contexts = [r.args[0] for r in requests]
            return [replies(r.doc) for r in requests]

    return Replies()


def _right(doc):
    return " " + doc["answer"].replace("#### ", "The answer is ") + "."


@pytest.mark.parametrize("shots", [0, 8])
def test_task_yamls_load_in_lm_eval(lm_eval_offline, repository, shots):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(repository / "eval" / "wordmath"), include_defaults=False)
    names = {"wordmath": "trained", "wordmath_heldout": "heldout", "wordmath_drills": "drills"}
    model = _answering(lm_eval_offline, lambda doc: _right(doc) if doc["steps"] > 1 else " The answer is 1234.")
    result = lm_eval_offline.simple_evaluate(
        model, tasks=list(names), num_fewshot=shots, limit=40, task_manager=manager, bootstrap_iters=0
    )
    for task, name in names.items():
        expected = sum(item.steps > 1 for item in eval_items(name, 40)) / 40
        scores = result["results"][task]
        assert scores["exact_match,strict-match"] == scores["exact_match,flexible-extract"] == expected
    assert all(c.startswith(prefix(shots) + "Q: ") and c.count("Q: ") == shots + 1 for c in model.contexts)
