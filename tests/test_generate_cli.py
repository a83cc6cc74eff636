"""`looped generate` and the palette it shares with the report."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from looped import LLM, SamplingParams
from looped.analysis.palette import RAMP, ansi, depth_counts, histogram, html, shade
from looped.gates import native_gate
from looped.generate_cli import Generated, Writer, legend
from looped.infer import Output
from looped.model import load, save
from tests.conftest import Ran
from tests.server.conftest import write_checkpoint

PROMPT = "Tom has 3 apples."


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("generate") / "micro")


@pytest.fixture
def generate(cli: Callable[..., Ran], micro: Path) -> Callable[..., Ran]:
    def run(*flags: object, prompt: str = PROMPT) -> Ran:
        return cli("generate", prompt, "--model", micro, "--device", "cpu", "--max-tokens", 20, *flags)

    return run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_equals_the_offline_api(generate: Callable[..., Ran], micro: Path) -> None:
    model = load(micro, device="cpu", dtype="float64")
    llm = LLM(model, gate=native_gate(model))
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=20, seed=3))
    done = generate("--dtype", "float64", "--temperature", 0.7, "--seed", 3, "--json")
    assert done.code == 0, done
    *text, last = done.out.removesuffix("\n").split("\n")
    result = json.loads(last)
    assert "\n".join(text) == result["text"] == expected.text
    assert (result["token_ids"], result["depths"]) == (expected.token_ids, expected.depths)
    assert len(set(result["depths"])) > 1
    assert result["finish_reason"] == expected.finish_reason
    assert result["mean_depth"] == pytest.approx(sum(expected.depths[1:]) / len(expected.depths[1:]))


def test_sampling_flags(generate: Callable[..., Ran], micro: Path) -> None:
    model = load(micro, device="cpu", dtype="float64")
    llm = LLM(model, gate=native_gate(model))
    sampled: dict[str, float] = {
        "top_p": 0.5,
        "top_k": 9,
        "min_p": 0.2,
        "repetition_penalty": 1.9,
        "presence_penalty": 2.0,
        "frequency_penalty": 1.5,
        "min_tokens": 4,
    }
    for names in (*([name] for name in sampled), list(sampled)):
        chosen = {name: sampled[name] for name in names}
        params = SamplingParams(temperature=1.2, max_tokens=20, seed=3, **chosen)  # type: ignore[arg-type]
        (expected,) = llm.generate(PROMPT, params)
        flags = [part for name in names for part in (f"--{name.replace('_', '-')}", sampled[name])]
        done = generate("--dtype", "float64", "--temperature", 1.2, "--seed", 3, "--json", *flags)
        assert json.loads(done.out.removesuffix("\n").split("\n")[-1])["token_ids"] == expected.token_ids
    (plain,) = llm.generate(PROMPT, SamplingParams(temperature=1.2, max_tokens=20, seed=3))
    stop = plain.text[5:7]
    done = generate("--dtype", "float64", "--temperature", 1.2, "--seed", 3, "--json", "--stop", stop)
    result = json.loads(done.out.removesuffix("\n").split("\n")[-1])
    assert (result["text"], result["finish_reason"]) == (plain.text[: plain.text.index(stop)], "stop")


def test_options_reach_the_engine(generate: Callable[..., Ran]) -> None:
    def depths(*flags: object) -> list[int]:
        return list(json.loads(generate("--json", "--ignore-eos", *flags).out.split("\n")[-2])["depths"])

    assert depths("--threshold", 0) == [4] + [1] * 19
    assert depths("--threshold", 0, "--min-depth", 2, "--kv", "last-exited") == [4] + [2] * 19
    assert depths("--depth", 3, "--gate", "none") == [3] * 20
    assert depths("--gate", "fixed-2") == [4] + [2] * 19
    assert depths("--mode", "cb") == [4] * 20


def test_plain_where_there_is_no_terminal(generate: Callable[..., Ran]) -> None:
    done = generate()
    assert "\x1b" not in done.out + done.err
    assert re.fullmatch(
        r"depth  1 . \d+  2 . \d+  3 . \d+  4 . \d+  \| mean \d\.\d\d of 4, \d+ tokens, \d+ tok/s, ended by \w+\n",
        done.err,
    )


def test_coloured_on_a_terminal(generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    def on_terminal(*flags: object) -> str:
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal)
            assert generate(*flags).code == 0
        return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, coloured = on_terminal("--no-color"), on_terminal()
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    used = {int(number) for number in re.findall(r"\x1b\[38;5;(\d+)m", coloured)}
    assert len(used) > 1
    assert used <= {shade(depth, 4).ansi for depth in range(1, 5)}
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal() == plain


def test_prompt_from_standard_input(generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert generate(prompt="-").out == generate().out
    monkeypatch.setattr("sys.stdin", io.StringIO("  \n"))
    assert "the prompt is empty" in generate(prompt="-").refusal
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    assert "not UTF-8" in generate(prompt="-").refusal


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--gate", "oura"), "did you mean 'ouro'?"),
        (("--kv", "raged"), "did you mean 'ragged'?"),
        (("--mode", "refil"), "did you mean 'refill'?"),
        (("--threshold", 1.5), "outside the range"),
        (("--depth", 0), "depth"),
        (("--temperature", -1), "temperature"),
        (("--top-p", 0), "top_p"),
        (("--min-tokens", 30), "min_tokens 30 is above max_tokens 20"),
        (("--stop", ""), "stop strings must not be empty"),
        (("--max-tokens", 0), "max_tokens"),
        (("--gate", "none", "--threshold", 0.5), "need a gate"),
        (("--device", "gpu"), "unknown device 'gpu'"),
        (("--gate", "fixed-99999999999999999999"), "no model has"),
    ],
)
def test_bad_input_is_one_sentence(generate: Callable[..., Ran], flags: tuple[object, ...], sentence: str) -> None:
    assert sentence in generate(*flags).refusal


def test_more_bad_input(cli: Callable[..., Ran], generate: Callable[..., Ran], micro: Path, tmp_path: Path) -> None:
    assert "context of 128" in generate(prompt="x" * 200).refusal
    assert "prompt is empty" in generate(prompt="").refusal
    assert "not UTF-8" in generate(prompt="caf\udce9").refusal
    assert "did you mean 'tiny-ouro'?" in cli("generate", "x", "--model", "tiny-oura").refusal
    bare = tmp_path / "bare"
    shutil.copytree(micro, bare)
    (bare / "tokenizer.json").unlink()
    assert "no tokenizer" in cli("generate", "x", "--model", bare, "--device", "cpu").refusal
    broken = load(micro)
    broken.norm.weight.fill_(torch.nan)
    save(broken, tmp_path / "broken")
    assert "not finite" in cli("generate", "x", "--model", tmp_path / "broken", "--device", "cpu").refusal


def test_a_character_of_several_tokens_takes_the_deepest_colour() -> None:
    terminal = Terminal()
    writer = Writer(terminal, 4, color=True)
    writer.take(Output("k", 7, 4, "", None))
    writer.take(Output("k", 8, 1, "é", None))
    writer.take(Output("k", 9, 1, "x", "length"))
    assert terminal.getvalue() == ansi("é", 4, 4) + ansi("x", 1, 4)
    assert writer.result() == Generated("éx", [7, 8, 9], [4, 1, 1], 1.0, "length")


def test_legend_of_one_token() -> None:
    assert "no decode tokens, 1 tokens" in legend(Generated("x", [1], [4], None, "length"), 4, 0.5, color=False)


def luminance(color: str) -> float:
    """Relative luminance (WCAG 2)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_are_readable_on_black_and_on_white() -> None:
    for color in RAMP:
        light = luminance(color.hex)
        assert (1.05 / (light + 0.05)) >= 3, color
        assert ((light + 0.05) / 0.05) >= 3, color


@pytest.mark.parametrize("max_depth", [1, 2, 4, 8, 16, 32])
def test_depths_spread_over_the_ramp(max_depth: int) -> None:
    shades = [shade(depth, max_depth) for depth in range(1, max_depth + 1)]
    assert shades[0] == RAMP[0]
    assert len(set(shades)) == min(max_depth, len(RAMP))
    if max_depth > 1:
        assert shades[-1] == RAMP[-1]
    assert [RAMP.index(one) for one in shades] == sorted(RAMP.index(one) for one in shades)


def test_terminal_and_page_agree() -> None:
    assert shade(2, 4).ansi == int(re.findall(r"38;5;(\d+)m", ansi("x", 2, 4))[0])
    assert html("<b>", 2, 4) == f'<span style="color:{shade(2, 4).hex}" title="depth 2">&lt;b&gt;</span>'
    assert ansi("", 1, 4) == ""


def test_histogram() -> None:
    assert histogram(depth_counts([1, 1, 1, 1, 3]), 4, color=False) == "1 █ 4  2   0  3 ▂ 1  4   0"
    assert histogram(depth_counts([2, 16]), 16, color=False) == "2 █ 1  16 █ 1"
    assert histogram({}, 2, color=False) == "1   0  2   0"
