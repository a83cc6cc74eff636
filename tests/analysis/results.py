"""Made-up results of a demo, to draw reports from."""

from __future__ import annotations

from looped.analysis.offline_results import DecodeOnly, ModeResult, OfflineResult
from looped.analysis.results import (
    FIXED,
    NATIVE,
    Answered,
    DemoResults,
    Distilled,
    LayoutRow,
    Piece,
    ScoreRow,
    Scores,
)


def score(layout: str, gate: str, threshold: float | None, accuracy: float, mean_depth: float) -> ScoreRow:
    return ScoreRow(
        layout=layout,
        gate=gate,
        threshold=threshold,
        max_depth=4 if threshold is not None else round(mean_depth),
        accuracy=accuracy,
        stderr=0.04,
        mean_depth=mean_depth,
        histogram=(10, 20, 30, 40),
        n=96,
        unfinished=2,
        dense=layout == "depth",
        tok_s=400.0,
    )


def made_up(question: str = "How many?", expected: str = "7") -> DemoResults:
    rows = [
        score(layout, gate, q, accuracy, depth)
        for layout in ("ragged", "shared")
        for gate, q, accuracy, depth in (
            (FIXED, None, 0.31, 1.0),
            (FIXED, None, 0.86, 4.0),
            (NATIVE, 0.3, 0.72, 2.11),
            (NATIVE, 0.5, 0.82, 2.78),
            ("lookahead", 0.5, 0.81, 2.70),
        )
    ]
    layouts = (LayoutRow("ragged", 4, 51_200), LayoutRow("shared", 1, 12_800))
    mode = {name: ModeResult(s, 0.04, (s - 8, s, s + 8), s / 400, s / 620, 6.5, {}) for name, s in SPEEDS.items()}
    bench = OfflineResult(
        modes=mode,
        mean_depth=2.31,
        mean_depth_with_first=2.35,
        depth_counts=(0, 120, 420, 180, 90),
        prefill_share=0.08,
        s_dec=1.62,
        s_e2e=1.55,
        realised=0.96,
        decode_only=DecodeOnly(1.64, 1.57, 0.95),
        tokens=640,
        prompt_tokens=560,
        rounds=3,
        agreement="no-refill and refill: the same tokens and exit depths",
        settings={
            "gate": "ouro",
            "threshold": 0.5,
            "num_requests": 16,
            "work_list": "word problems",
            "kv": "ragged",
            "max_num_seqs": 8,
            "device": "cpu",
            "dtype": "float32",
            "threads": 2,
        },
    )
    answer = Answered(question, (Piece("The answer", 4), Piece(" is <7>", 2)), "stop", expected, 0.31, "native at 0.5")
    return DemoResults(
        model="tiny-ouro",
        parameters=7_666_561,
        max_loops=4,
        revision="abc",
        gates=(Distilled("lookahead", 642, 2, 0.49, 2.38, 0.5, 2.4, 0.91, 0.55, 0.88, 12_000),),
        scores=Scores("wordmath", 96, "ragged", 4, tuple(rows), layouts, 128),
        drills=Scores("wordmath-drills", 96, "ragged", 4, tuple(rows[:5]), layouts[:1], 128),
        bench=bench,
        answers=(answer,),
        seconds={"gates": 50.0},
        settings={"machine": "2 cores"},
        commands=(("Distil a gate", "looped train-gate --gate lookahead"),),
    )


SPEEDS = {"cb": 400.0, "no-refill": 540.0, "refill": 600.0}
