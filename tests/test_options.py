"""Options: flags, YAML, precedence, conversion, and one sentence for every mistake."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped.errors import LoopedError
from looped.options import HelpRequested, argument, from_dict, option, parse


@dataclass(frozen=True)
class Optim:
    lr: float = option(1e-3, "learning rate")
    betas: tuple[float, float] = option((0.9, 0.95), "decay of the two moments")


@dataclass(frozen=True)
class Phase:
    steps: int
    mix: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """Score a model.

    And more about it.
    """

    task: str = argument("the task", choices=("gsm8k", "wordmath"))
    model: str = option("tiny-ouro", "name, hub id or folder")
    kv: Literal["depth", "ragged", "shared"] | None = option(None, "KV layout")
    num_fewshot: int | None = option(None, "exemplars before each question")
    threshold: float | None = option(None, "exit threshold")
    ignore_eos: bool = option(False, "run to max_tokens")
    flash: bool = option(True, "use flash attention")
    data: Path | None = option(None, "a data file")
    depths: tuple[int, ...] = option((), "depths to score")
    mix: dict[str, float] = option({"drills": 1.0}, "share of each source")
    width: int | Literal["auto"] = option("auto", "a width")
    optim: Optim = Optim(lr=3e-4)
    teacher: Optim | None = None
    phases: tuple[Phase, ...] = option((), "training phases")


def read(*words: str) -> Options:
    return parse(Options, words, "looped eval")


def refusal(*words: str) -> str:
    with pytest.raises(LoopedError) as caught:
        read(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: Path, text: str) -> str:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return str(file)


def test_defaults_of_outer_and_nested() -> None:
    options = read("gsm8k")
    assert options == Options(task="gsm8k")
    assert options.optim.lr == 3e-4  # the instance in the field, not Optim's own default


def test_flags_of_every_type() -> None:
    options = read(
        *("--kv", "shared", "gsm8k", "--num-fewshot=5", "--threshold", "-1e-2", "--ignore-eos", "--no-flash"),
        *(
            "--data",
            "a/b.jsonl",
            "--depths",
            "1,2,4",
            "--mix",
            "a=0.5,b=2",
            "--width",
            "64",
            "--optim.betas",
            "0.8,0.9",
        ),
    )
    assert options == Options(
        task="gsm8k", kv="shared", num_fewshot=5, threshold=-0.01, ignore_eos=True, flash=False, data=Path("a/b.jsonl"),
        depths=(1, 2, 4), mix={"a": 0.5, "b": 2.0}, width=64, optim=Optim(lr=3e-4, betas=(0.8, 0.9)),
    )  # fmt: skip


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        "task: wordmath\nnum_fewshot: 8\nflash: false\noptim: {lr: 1e-2, betas: [0.5, 0.6]}\n"
        "phases:\n- {steps: 1e3, mix: {drills: 1}}\n- steps: 2\n",
    )
    options = read("--config", recipe, "--num-fewshot", "0", "--optim.lr", "0.5")
    assert (options.task, options.num_fewshot, options.flash) == ("wordmath", 0, False)
    assert options.optim == Optim(lr=0.5, betas=(0.5, 0.6))
    assert options.phases == (Phase(1000, {"drills": 1.0}), Phase(2))
    assert read("gsm8k", "--config", recipe).task == "gsm8k"


def test_optional_section(tmp_path: Path) -> None:
    assert read("gsm8k", "--teacher.lr", "2").teacher == Optim(lr=2.0)
    assert read("gsm8k", "--config", write(tmp_path, "teacher: null")).teacher is None


def test_none_can_be_said() -> None:
    assert from_dict(Options, {"task": "gsm8k", "num_fewshot": None}, "x").num_fewshot is None
    assert read("gsm8k", "--num-fewshot", "none").num_fewshot is None


def test_mutable_defaults_are_not_shared() -> None:
    assert read("gsm8k").mix is not read("gsm8k").mix


@dataclass(frozen=True)
class Texts:
    first: str = argument("one text")
    others: tuple[str, ...] = argument("more texts", default=())


def test_words_that_look_like_flags_and_words_that_remain() -> None:
    assert parse(Texts, ["--", "-x", "--y"], "p") == Texts("-x", ("--y",))
    assert parse(Texts, ["a, b", "c, d", "e"], "p") == Texts("a, b", ("c, d", "e"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "TASK is missing (the task); see looped eval --help"),
        (
            ["gsm8k", "--num-fewsht", "5"],
            "unknown flag --num-fewsht; did you mean --num-fewshot? see looped eval --help",
        ),
        (["gsm8k", "--num_fewshot", "5"], "unknown flag --num_fewshot; did you mean --num-fewshot? "),
        (["gsm8k", "--optim.lrr", "5"], "did you mean --optim.lr?"),
        (["gsm8k", "--no-ignore-eoss"], "did you mean --no-ignore-eos?"),
        (["gsm8k", "--zzzzzzzz"], "unknown flag --zzzzzzzz; see looped eval --help"),
        (["gsm8k", "extra"], "unexpected argument 'extra'"),
        (["gsm9k"], "unknown TASK 'gsm9k'; did you mean 'gsm8k'?"),
        (["gsm8k", "--kv", "raged"], "unknown --kv 'raged'; did you mean 'ragged'? known: depth, ragged, shared"),
        (["gsm8k", "--num-fewshot", "2.5"], "--num-fewshot expects a whole number, got '2.5'"),
        (["gsm8k", "--num-fewshot", "--kv"], "--num-fewshot needs a value: a whole number"),
        (["gsm8k", "--threshold", "nan"], "--threshold expects a number, got 'nan'"),
        (["gsm8k", "--threshold"], "--threshold needs a value: a number"),
        (["gsm8k", "--ignore-eos=maybe"], "--ignore-eos expects true or false, got 'maybe'"),
        (["gsm8k", "--depths", "1,x"], "--depths expects a whole number, got 'x'"),
        (["gsm8k", "--optim.betas", "1"], "--optim.betas expects 2 values, got 1"),
        (["gsm8k", "--mix", "a"], "--mix expects a list of name=value, each value a number, got 'a'"),
        (["gsm8k", "--width", "wide"], "--width expects a whole number or one of auto, got 'wide'"),
        (["gsm8k", "--config", "missing.toml"], "configuration file 'missing.toml' does not exist"),
    ],
)
def test_mistakes_on_the_line(words: list[str], sentence: str) -> None:
    assert sentence in refusal(*words)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_fewsht: 5", "recipe.yaml: unknown key 'num_fewsht'; did you mean 'num_fewshot'?"),
        ("optim: {lrr: 5}", "recipe.yaml: unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("optim: 5", "recipe.yaml: optim expects a mapping of option names to values, got 5"),
        ("optim: null", "recipe.yaml: optim expects a mapping"),
        ("num_fewshot: [1]", "recipe.yaml: num_fewshot expects a whole number, got [1]"),
        ("num_fewshot: true", "recipe.yaml: num_fewshot expects a whole number, got True"),
        ("model: 5", "recipe.yaml: model expects text, got 5"),
        ("phases: [{stepz: 1}]", "recipe.yaml: phases: unknown key 'stepz'; did you mean 'steps'?"),
        ("phases: [{}]", "recipe.yaml: phases: steps is missing"),
        ("- 1", "recipe.yaml must hold a mapping of option names to values, but holds [1]"),
        ("a: [", "recipe.yaml is not valid YAML: "),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refusal("gsm8k", "--config", write(tmp_path, text))


def test_help_names_every_value_with_its_doc_and_default() -> None:
    with pytest.raises(HelpRequested) as caught:
        read("--kv", "ragged", "--help")
    text = str(caught.value)
    assert text.startswith("usage: looped eval TASK [flags]\n\nScore a model.\n\nAnd more about it.\n")
    assert "TASK {gsm8k,wordmath}" in text
    assert "--kv {depth,ragged,shared}" in text
    assert "learning rate (default: 0.0003)" in text
    assert "--[no-]flash            use flash attention (default: on)" in text
    assert "--config PATH" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_recipe_that_ships_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root" / "recipes").mkdir(parents=True)
    (tmp_path / "root" / "recipes" / "gate.yaml").write_text("num_fewshot: 3")
    monkeypatch.setattr("looped.files.shipped_root", lambda: tmp_path / "root")
    monkeypatch.chdir(tmp_path)
    assert read("gsm8k", "--config", "recipes/gate.yaml").num_fewshot == 3
    assert refusal("gsm8k", "--config", "recipes/gat.yaml") == (
        "configuration file 'recipes/gat.yaml' does not exist; did you mean 'recipes/gate.yaml'?"
    )


@given(st.integers(), st.floats(allow_nan=False), st.booleans(), st.sampled_from(["depth", "ragged", "shared", None]))
def test_text_and_yaml_agree(number: int, real: float, switch: bool, kv: str | None) -> None:
    values: dict[str, Any] = {"task": "gsm8k", "num_fewshot": number, "threshold": real, "ignore_eos": switch, "kv": kv}
    words = ["gsm8k", f"--num-fewshot={number}", f"--threshold={real}", f"--ignore-eos={switch}", f"--kv={kv}"]
    assert read(*[word.replace("=None", "=none") for word in words]) == from_dict(Options, values, "x")
