"""The demo's report: one HTML file without scripts or anything from elsewhere, drawn from `DemoResults`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from looped.analysis import charts
from looped.analysis.results import FIXED, Answered, DemoResults, Distilled, ScoreRow, Scores
from looped.analysis.style import STYLE


def render(results: DemoResults) -> str:
    """The whole page."""
    sections = (
        _accuracy(results.scores),
        _drills(results.drills),
        _throughput(results),
        _exits(results),
        _texts(results),
        _gates(results),
    )
    body = "\n".join((_head(results), *sections, _settings(results)))
    title = f"looped: {results.model}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n"
        "</html>\n"
    )


def _head(results: DemoResults) -> str:
    bench, scores, drills = results.bench, results.scores, results.drills
    tiles: list[tuple[str, str]] = []
    refill = bench.modes.get("refill")
    if refill and refill.speedup and bench.s_e2e:
        bound = f"bound {bench.s_e2e:.2f} ×, {bench.realised or 0:.0%} of it realised"
        tiles.append((f"{refill.speedup:.2f} ×", f"tokens a second with refill, against full depth ({bound})"))
    for found in (scores, drills):
        own, full = found.native(own_threshold(results)), found.full_depth
        if own:
            against = f"; {full.share} with all {found.max_loops} loops" if full else ""
            text = f"of {found.task} right at {own.mean_depth:.2f} loops a token, native gate at {own.threshold:g}"
            tiles.append((own.share, f"{text}{against} (n = {own.n})"))
    boxes = "".join(f'<div class="tile"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in tiles)
    text = (
        f"A looped language model of {results.parameters / 1e6:.1f} million parameters that runs its core up to "
        f"{results.max_loops} times a token. Exit gates decide how often; KV layouts decide what a token that left "
        "early leaves behind; the engine turns loops that were not run into time."
    )
    return (
        f"<h1>{escape(results.model)}: gates, layouts and speed in one run</h1>\n"
        f'<p class="lead">{escape(text)}</p>\n<div class="tiles">{boxes}</div>'
    )


def own_threshold(results: DemoResults) -> float:
    """The native gate's threshold in the bench."""
    threshold = results.bench.settings.get("threshold")
    return float(threshold) if isinstance(threshold, float | int) else 0.5


def _drills(scores: Scores) -> str:
    return _section(
        "Where depth must do the work",
        f"Exact match on {scores.n} problems of <code>{escape(scores.task)}</code>: arithmetic answered at once, "
        "without written steps, so that only loops can compute. Everything else as above.",
        charts.legend(scores.gate_names)
        + _panels(scores)
        + _details("All scores as a table", _score_table(scores.rows)),
    )


def _accuracy(scores: Scores) -> str:
    left_out = f" {scores.left_out} settings were left out for time." if scores.left_out else ""
    worst = max(scores.rows, key=lambda row: row.unfinished, default=None)
    late = f" Answers that ran into the limit: up to {worst.unfinished} (under {worst.layout})." if worst else ""
    return _section(
        "Accuracy against mean depth, by KV layout and gate",
        f"Exact match on {scores.n} problems of <code>{escape(scores.task)}</code>, without exemplars, greedy, at most "
        f"{scores.max_new_tokens} new tokens. Vertical bars are one standard error; all settings answer the same "
        "problems. The dashed grey line runs every token, prompts included, at a fixed depth (one computation, and one "
        "measurement, for all layouts with a plane for each loop). The distilled gates were trained under the model’s "
        "own layout." + escape(late + left_out),
        charts.legend(scores.gate_names)
        + _panels(scores)
        + _details("All scores as a table", _score_table(scores.rows)),
    )


def _panels(scores: Scores) -> str:
    panels = []
    for layout in scores.layout_names:
        cost = next((row for row in scores.layouts if row.layout == layout), None)
        told = f": {_planes(cost.planes)}, {cost.bytes_per_token / 1024:.1f} KiB a token" if cost else ""
        told += "; the model’s own" if layout == scores.default_layout else ""
        dense = any(row.dense and row.gate != FIXED for row in scores.of(layout))
        told += ". All loops run; a gate only picks the output" if dense else ""
        panels.append(
            f"<figure><figcaption><b>{escape(layout)}</b>{escape(told)}</figcaption>"
            f"{charts.accuracy_panel(scores, layout)}</figure>"
        )
    kind = "panels single" if len(panels) == 1 else "panels"
    return f'<div class="{kind}">{"".join(panels)}</div>'


def _planes(count: int) -> str:
    return "1 plane" if count == 1 else f"{count} planes"


def _score_table(rows: Sequence[ScoreRow]) -> str:
    return _table(
        ("layout", "gate", "threshold", "accuracy", "mean depth", "n", "cut off"),
        [
            (
                row.layout,
                f"depth {row.max_depth}" if row.gate == FIXED else row.gate,
                "" if row.threshold is None else f"{row.threshold:g}",
                row.share,
                number(row.mean_depth),
                str(row.n),
                str(row.unfinished),
            )
            for row in rows
        ],
    )


def _throughput(results: DemoResults) -> str:
    bench = results.bench
    told = bench.settings
    strict = bench.decode_only
    gate = f"the {told['gate']} gate at {told['threshold']:g}" if told["gate"] else "no gate"
    text = (
        f"{told['num_requests']} requests ({told['work_list']}), {bench.prompt_tokens:,} prompt tokens, "
        f"{bench.tokens:,} generated under each scheduler; {gate}, layout {told['kv']}, at most {told['max_num_seqs']} "
        f"sequences at once, {told['device']} in {told['dtype']} with {told['threads']} threads. Medians of "
        f"{bench.rounds} rounds in which the schedulers took turns; the short strokes run from the slowest round to "
        "the fastest."
    )
    notes = [f"{bench.agreement[:1].upper()}{bench.agreement[1:]}."]
    if bench.s_e2e is not None and bench.prefill_share is not None:
        notes.append(
            f"Mean depth {bench.mean_depth_with_first:.2f} with first tokens bounds decode at "
            f"S_dec = {bench.s_dec:.3f}; prefill takes {bench.prefill_share:.1%} of cb’s time, which leaves S_e2e = "
            f"{bench.s_e2e:.3f}. Refill realises {bench.realised or 0:.0%} of it. (With first tokens counted as "
            f"prefill alone: depth {bench.mean_depth:.2f}, S_e2e = {strict.s_e2e or 0:.3f}, realised "
            f"{strict.realised or 0:.0%}.)"
        )
    rows = [
        (
            name,
            f"{mode.tok_s:.1f}",
            f"{mode.spread:.1%}",
            "" if mode.speedup is None else f"{mode.speedup:.2f}",
            "" if mode.realised is None else f"{mode.realised:.0%}",
            f"{mode.mean_core_batch:.1f}",
        )
        for name, mode in bench.modes.items()
    ]
    header = ("scheduler", "tokens/s", "spread", "× cb", "of S_e2e", "rows a core step")
    return _section(
        "Throughput against the bound",
        escape(text),
        f'<div class="wide">{charts.throughput(bench)}</div>'
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        + _details("The numbers", _table(header, rows)),
    )


def _exits(results: DemoResults) -> str:
    scores, bench = results.scores, results.bench
    rows: list[tuple[str, Sequence[int]]] = [("bench", bench.depth_counts[1:])]
    for gate in scores.gate_names:
        if gate != FIXED:
            rows += [(f"{gate}, {row.threshold:g}", row.histogram) for row in scores.of(scores.default_layout, gate)]
    drilled = results.drills.native(own_threshold(results))
    if drilled:
        rows.append((f"drills: native, {drilled.threshold:g}", drilled.histogram))
    return _section(
        "Where tokens leave",
        f"The share of decode tokens that left after each number of loops under layout "
        f"{escape(scores.default_layout)}, by gate and threshold: in the bench, the word problems and the drills.",
        charts.depth_legend(results.max_loops) + f'<div class="wide">{charts.exits(rows, results.max_loops)}</div>',
    )


def _texts(results: DemoResults) -> str:
    return _section(
        "Answers over HTTP, coloured by depth",
        "Chat requests to the server in this run; each token has the colour of the number of loops that produced it. "
        "Point at one to see it. The first token of an answer comes from the prompt’s pass, which runs all loops.",
        charts.depth_legend(results.max_loops)
        + "".join(_answer(answer, results.max_loops) for answer in results.answers),
    )


def _answer(answer: Answered, max_loops: int) -> str:
    return (
        f'<p class="question">{escape(answer.question)}</p>'
        f'<div class="tokens">{charts.tokens(answer.pieces, max_loops)}</div>'
        f'<p class="note">Expected: {escape(answer.expected)}. This took {len(answer.pieces)} tokens and '
        f"{answer.seconds:.2f} s, mean depth {number(answer.mean_depth)}, finish reason "
        f"{escape(answer.finish_reason)}; {escape(answer.settings)}.</p>"
    )


def _gates(results: DemoResults) -> str:
    header = (
        "gate",
        "weights",
        "exits from",
        "threshold",
        "mean depth",
        "teacher",
        "agreement",
        "constant",
        "kappa",
        "n",
    )
    return _section(
        "Gates distilled in this run",
        "Both learn the model’s own gate on a frozen model. The lookahead gate decides one loop ahead, so that an "
        "engine can prepare the next batch in time; the pre-loop gate decides before the first loop. The gate’s "
        "threshold is the one that gives the mean depth of its teacher, whose exits below the gate’s first are moved "
        "up to it. Agreement: the share of held-out tokens that leave at the teacher’s very depth; constant: the same "
        "for the best single depth; kappa: agreement beyond chance, weighted by distance.",
        _table(header, [_gate_row(gate) for gate in results.gates]),
    )


def _gate_row(gate: Distilled) -> tuple[str, ...]:
    return (
        gate.gate,
        f"{gate.parameters:,}",
        f"depth {gate.min_depth}",
        f"{gate.threshold:.3f}",
        number(gate.mean_depth),
        f"{gate.teacher_mean_depth:.2f} at {gate.teacher_threshold:g}",
        f"{gate.agreement:.1%}",
        f"{gate.constant_agreement:.1%}",
        number(gate.kappa),
        f"{gate.positions:,}",
    )


def _settings(results: DemoResults) -> str:
    steps = " · ".join(f"{name} {seconds:.0f} s" for name, seconds in results.seconds.items())
    rows = [(name, value) for name, value in (*results.settings.items(), ("steps", steps))]
    commands = "".join(
        f'<p class="note">{escape(what)}</p><pre>{escape(command)}</pre>' for what, command in results.commands
    )
    body = "".join(f'<tr><td>{escape(n)}</td><td class="words">{escape(v)}</td></tr>' for n, v in rows)
    return _section(
        "How this was made",
        "Everything above was measured in one run of <code>looped demo</code>. The steps by themselves:",
        f'{commands}<div class="table"><table>{body}</table></div>',
    )


def _section(title: str, text: str, content: str) -> str:
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="note">{text}</p>\n{content}\n</section>'


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value: float) -> str:
    """Two digits, or a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.2f}"
