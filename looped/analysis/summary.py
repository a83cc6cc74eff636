"""The demo's results as one table of Markdown, for the terminal and the README."""

from __future__ import annotations

from looped.analysis.report import own_point, percent
from looped.analysis.results import NATIVE, DemoResults


def summary(results: DemoResults) -> str:
    """Two columns: what was measured, and what came out, with n and standard errors."""
    rows = [("measured", "result"), *_scores(results), *_gates(results), *_bench(results), *_answers(results)]
    width = max(len(left) for left, _ in rows)
    lines = [f"| {left:<{width}} | {right} |" for left, right in rows]
    return "\n".join([lines[0], f"|{'-' * (width + 2)}|---|", *lines[1:]])


def _scores(results: DemoResults) -> list[tuple[str, str]]:
    scores, own, rows = results.scores, own_point(results), []
    full = scores.full_depth
    if full:
        value = f"{percent(full.accuracy, full.stderr)} right, n = {full.n}"
        rows.append((f"{scores.task}, 0-shot, all {scores.max_loops} loops", value))
    if own is None:
        return rows
    for layout in scores.layout_names:
        same = [row for row in scores.of(layout, NATIVE) if row.threshold == own.threshold]
        size = next((row.bytes_per_token for row in scores.layouts if row.layout == layout), 0)
        for row in same:
            name = f"native gate at {row.threshold:g}, {layout} KV"
            value = f"{percent(row.accuracy, row.stderr)} at mean depth {row.mean_depth:.2f}"
            rows.append((name, f"{value}, up to {size / 1024:.1f} KiB a token"))
    return rows


def _gates(results: DemoResults) -> list[tuple[str, str]]:
    rows = []
    for gate in results.gates:
        scored = results.scores.of(results.scores.default_layout, gate.gate)
        point = min(scored, key=lambda row: abs((row.threshold or 0) - gate.threshold), default=None)
        value = f"exits as its teacher on {percent(gate.agreement)} of tokens"
        if point:
            value += f"; {percent(point.accuracy, point.stderr)} right at mean depth {point.mean_depth:.2f}"
        rows.append((f"{gate.gate} gate, distilled here", value))
    return rows


def _bench(results: DemoResults) -> list[tuple[str, str]]:
    bench = results.bench
    speeds = " / ".join(f"{mode.tok_s:.0f}" for mode in bench.modes.values())
    rows = [(f"tokens/s, {' / '.join(bench.modes)}", f"{speeds} ({bench.settings['threads']} threads)")]
    refill = bench.modes.get("refill")
    if refill and refill.speedup and bench.s_e2e:
        value = f"{refill.speedup:.2f} ×, bound {bench.s_e2e:.2f} ×, {bench.realised or 0:.0%} of it realised"
        rows.append((f"refill against cb at mean depth {bench.mean_depth:.2f}", value))
    return rows


def _answers(results: DemoResults) -> list[tuple[str, str]]:
    if not results.answers:
        return []
    answer = results.answers[0]
    return [("chat request to the server", f"{len(answer.pieces)} tokens, mean depth {answer.mean_depth:.2f}")]
