"""The demo's results as one table of Markdown, for the terminal and the README."""

from __future__ import annotations

from looped.analysis.report import own_threshold
from looped.analysis.results import NATIVE, DemoResults, Scores


def summary(results: DemoResults) -> str:
    """Two columns: what was measured, and what came out, with n and standard errors."""
    found = (*_scores(results.scores, results), *_layouts(results), *_scores(results.drills, results))
    rows = [("measured", "result"), *found, *_gates(results), *_bench(results), *_answers(results)]
    width = max(len(left) for left, _ in rows)
    lines = [f"| {left:<{width}} | {right} |" for left, right in rows]
    return "\n".join([lines[0], f"|{'-' * (width + 2)}|---|", *lines[1:]])


def _scores(scores: Scores, results: DemoResults) -> list[tuple[str, str]]:
    """Fixed depths, then the native gate, under the model's own layout."""
    rows = []
    if scores.fixed:
        depths = " / ".join(str(row.max_depth) for row in scores.fixed)
        shares = " / ".join(row.share for row in scores.fixed)
        rows.append((f"{scores.task}, 0-shot, fixed depth {depths}", f"{shares} right (n = {scores.n})"))
    own = scores.native(own_threshold(results))
    if own:
        name = f"{scores.task}, 0-shot, native gate at {own.threshold:g}"
        rows.append((name, f"{own.share} right at mean depth {own.mean_depth:.2f} (n = {own.n})"))
    return rows


def _layouts(results: DemoResults) -> list[tuple[str, str]]:
    """The native gate under the other layouts, and what a token of full depth costs under each."""
    scores, own = results.scores, results.scores.native(own_threshold(results))
    rows = []
    for cost in scores.layouts:
        row = next((row for row in scores.of(cost.layout, NATIVE) if own and row.threshold == own.threshold), None)
        if row:
            value = f"{row.share} right; KV of a full-depth token {cost.bytes_per_token / 1024:.0f} KiB"
            rows.append((f"the same under {cost.layout} KV", value))
    return rows


def _gates(results: DemoResults) -> list[tuple[str, str]]:
    rows = []
    for gate in results.gates:
        scored = results.scores.of(results.scores.default_layout, gate.gate)
        point = min(scored, key=lambda row: abs((row.threshold or 0) - gate.threshold), default=None)
        value = (
            f"exits with its teacher on {gate.agreement:.1%} of tokens (best constant {gate.constant_agreement:.1%})"
        )
        if point:
            value += f"; {results.scores.task}: {point.share} at mean depth {point.mean_depth:.2f}"
        rows.append((f"{gate.gate} gate, distilled in this run", value))
    return rows


def _bench(results: DemoResults) -> list[tuple[str, str]]:
    bench = results.bench
    speeds = " / ".join(f"{mode.tok_s:.0f}" for mode in bench.modes.values())
    spread = max(mode.spread for mode in bench.modes.values())
    told = f"{bench.settings['threads']} threads, {bench.rounds} rounds, within {spread:.0%} of each other"
    rows = [(f"tokens/s, {' / '.join(bench.modes)}", f"{speeds} ({told})")]
    refill = bench.modes.get("refill")
    if refill and refill.speedup and bench.s_e2e:
        value = f"{refill.speedup:.2f} ×; bound S_e2e {bench.s_e2e:.2f} ×, {bench.realised or 0:.0%} of it realised"
        rows.append((f"refill against cb at mean depth {bench.mean_depth:.2f}", value))
    return rows


def _answers(results: DemoResults) -> list[tuple[str, str]]:
    if not results.answers:
        return []
    right = sum(answer.text.rstrip().endswith(f"answer is {answer.expected}.") for answer in results.answers)
    tokens = sum(len(answer.pieces) for answer in results.answers)
    return [("chat requests to the server", f"{len(results.answers)} answered, {right} right, {tokens} tokens")]
