"""Packed sets: reproducible, whatever the number of workers, with masks that point at the answers."""

import json

import numpy as np
import pytest

from looped.data import tokenizer as tokenizers_
from looped.data.build import build_dataset
from looped.data.exemplars import prefix
from looped.data.mixture import DataConfig, Mix
from looped.data.packed import read_packed
from looped.data.packing import ANSWER_NUMBER, ANSWER_SIDE, DIRECT
from looped.errors import LoopedError

TOKENIZER = tokenizers_.load()


def build(folder, tokens, **options):
    return build_dataset(DataConfig(str(folder), tokens, **options))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return build(tmp_path_factory.mktemp("data") / "set", 400_000, seed=7, workers=1)


def test_workers_do_not_change_the_result(tmp_path):
    options = {"tokens": 2100 * 65, "seq_len": 64, "seed": 3}
    one, two = build(tmp_path / "one", workers=1, **options), build(tmp_path / "two", workers=2, **options)
    assert read_packed(one).tokens.shape == (2100, 65)
    for name in ("tokens.npy", "mask.npy"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    other = build(tmp_path / "other", workers=1, **{**options, "seed": 4})
    assert (other / "tokens.npy").read_bytes() != (one / "tokens.npy").read_bytes()


def test_a_longer_set_starts_with_the_shorter_one(packed, tmp_path):
    longer = build(tmp_path / "longer", 500_000, seed=7, workers=1)
    short, long = read_packed(packed), read_packed(longer)
    assert np.array_equal(long.tokens[: len(short.tokens)], short.tokens)


def test_masks_mark_the_answers(packed):
    windows = read_packed(packed)
    seen_direct = 0
    for row in range(40):
        ids, mask = windows.tokens[row].tolist(), windows.mask[row]
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        answers = text.split("The answer is ")
        marked = "".join(
            TOKENIZER.decode([i]) if m & ANSWER_NUMBER else " " for i, m in zip(ids, mask, strict=True)
        ).split()
        start = 0
        if text.startswith("Q: There are 15 trees"):
            while start < 8 and text.count("The answer is ") > start and answers[start + 1 :]:
                if not text.startswith(prefix(start + 1)):
                    break
                start += 1
        expected = [a.split(".")[0].split("\n")[0] for a in answers[start + 1 :]]
        assert marked == [e for e in expected if e], row
        assert not np.any((mask & ANSWER_NUMBER != 0) & (mask & ANSWER_SIDE == 0))
        seen_direct += int(np.sum((mask & (DIRECT | ANSWER_NUMBER)) == (DIRECT | ANSWER_NUMBER)))
        for i in np.flatnonzero(mask & ANSWER_NUMBER):
            assert TOKENIZER.decode([ids[i]]).isdigit()
    assert seen_direct > 20


def test_answer_side_starts_after_the_colon(packed):
    windows = read_packed(packed)
    for row in range(20):
        side = (windows.mask[row] & ANSWER_SIDE) != 0
        for i in np.flatnonzero(side[1:] & ~side[:-1]) + 1:
            assert TOKENIZER.decode(windows.tokens[row][i - 3 : i].tolist()) == "\nA:"


def test_windows_start_with_a_question_or_the_exemplars(packed):
    windows = read_packed(packed)
    starts = [TOKENIZER.decode(row[:40].tolist()) for row in windows.tokens]
    assert all(s.startswith("Q: ") for s in starts)
    shots = sum(s.startswith("Q: There are 15 trees in the grove.") for s in starts)
    assert 0.15 < shots / len(starts) < 0.35
    ends = np.mean([np.sum(row == 0) for row in windows.tokens])
    assert ends > 3


def test_shares_are_near_the_mix(packed):
    share = read_packed(packed).manifest["token_share"]
    ratio = share["drills"] / share["words"]
    assert abs(ratio - 0.22 / 0.78) < 0.05
    assert "gsm8k" not in share


def test_evaluation_split_shares_no_window(packed, tmp_path):
    evaluation = read_packed(build(tmp_path / "eval", 50_000, seed=7, workers=1, split="eval"))
    text = TOKENIZER.decode(np.asarray(evaluation.tokens).ravel().tolist(), skip_special_tokens=False)
    questions = {d.split("\nA:")[0] for d in text.split("Q: ")[1:]}
    training = TOKENIZER.decode(np.asarray(read_packed(packed).tokens).ravel().tolist(), skip_special_tokens=False)
    shared = questions & {d.split("\nA:")[0] for d in training.split("Q: ")[1:]}
    complete = [q for q in shared if q.endswith(("?", ".")) and q not in prefix()]
    assert len(questions) > 300
    assert complete == []


def test_gsm8k_and_text_sources(tmp_path, gsm8k_folder):
    note = tmp_path / "note.txt"
    note.write_text("A plain note about nothing.\n\n" * 200, encoding="utf-8")
    folder = build(
        tmp_path / "set",
        300_000,
        workers=1,
        gsm8k=str(gsm8k_folder / "train.jsonl"),
        text=(str(note),),
        mix=Mix(words=0.4, drills=0.2, gsm8k=0.3, text=0.1),
    )
    windows = read_packed(folder)
    share = windows.manifest["token_share"]
    assert abs(share["gsm8k"] - 0.3 * (1 - share["exemplars"])) < 0.06
    assert 0.02 < share["text"] < 0.15
    text = TOKENIZER.decode(np.asarray(windows.tokens).ravel().tolist())
    assert "<<" not in text
    assert "####" not in text
    assert "A plain note about nothing." in text


def test_same_config_is_reused_and_another_refused(packed):
    before = (packed / "tokens.npy").stat().st_mtime_ns
    assert build(packed, 400_000, seed=7, workers=2) == packed
    assert (packed / "tokens.npy").stat().st_mtime_ns == before
    with pytest.raises(LoopedError, match="another packed data set"):
        build(packed, 400_000, seed=8)


def test_bad_folders_and_sources(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(LoopedError, match="not empty"):
        build_dataset(DataConfig(str(tmp_path / "full"), tokens=1000))
    with pytest.raises(LoopedError, match="no text file"):
        build(tmp_path / "a", 1000, text=("absent.txt",))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"problem": "1+1", "solution": "2"}) + "\n")
    with pytest.raises(LoopedError, match="it has problem, solution"):
        build(tmp_path / "b", 1000, gsm8k=str(rows))
    with pytest.raises(LoopedError, match="holds no packed data set"):
        read_packed(tmp_path)
    assert not (tmp_path / "a").exists()
