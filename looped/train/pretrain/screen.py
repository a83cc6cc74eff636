"""Several short runs side by side, one table at the end: which recipe uses its depth.

    python -m looped.train.pretrain.screen --recipe recipes/tiny-ouro.yaml --output DIR --seconds 150 \\
        --variants 'base:;paper:objective.beta_schedule=paper,objective.floor=0.1'

Runs are dealt to the GPUs in turn. A variant is NAME:KEY=VALUE,...; `@PATH,` as first word replaces the recipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from looped.errors import LoopedError
from looped.options import HelpRequested, option, parse
from looped.progress import last_json


@dataclass(frozen=True)
class Options:
    """Run variants of a recipe at the same time and compare them."""

    recipe: Path = option(Path("recipes/tiny-ouro.yaml"), "recipe that all variants start from")
    output: Path | None = option(None, "folder for the runs, one folder each")
    variants: str = option("base:", "NAME:KEY=VALUE,... of each run, separated by semicolons")
    seconds: float = option(150.0, "time of each process")
    gpus: int = option(1, "GPUs that the runs are dealt to; 0 runs on the CPU")
    data: Path | None = option(None, "folder of the packed windows, shared by all")
    flags: str = option("", "further flags for all runs, as on the command line of `looped train`")


class Variant(NamedTuple):
    """One run: its name, its recipe, and what it changes."""

    name: str
    recipe: Path
    changes: dict[str, str]


def read_variants(text: str, recipe: Path) -> list[Variant]:
    """The runs of the `variants` flag. Raises LoopedError for one without a name or with a word that sets nothing."""
    variants = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, rest = part.partition(":")
        words = [word.strip() for word in rest.split(",") if word.strip()]
        chosen = recipe
        if words and words[0].startswith("@"):
            chosen = Path(words.pop(0)[1:])
        wrong = [word for word in words if "=" not in word]
        if not colon or not name or wrong:
            raise LoopedError(f"variant {part!r} must read NAME:KEY=VALUE,KEY=VALUE")
        variants.append(Variant(name, chosen, dict(word.split("=", 1) for word in words)))
    if not variants or len({variant.name for variant in variants}) != len(variants):
        raise LoopedError("variants must name at least one run, each name once")
    return variants


def run(options: Options) -> int:
    """Start all runs, wait, print the table and the summaries as JSON."""
    if options.output is None:
        raise LoopedError("output is missing: give a folder for the runs with --output")
    variants = read_variants(options.variants, options.recipe)
    options.output.mkdir(parents=True, exist_ok=True)
    processes = [(variant, _start(options, variant, index)) for index, variant in enumerate(variants)]
    results: dict[str, Any] = {}
    for variant, process in processes:
        code = process.wait()
        summary = options.output / variant.name / "summary.json"
        if code or not summary.is_file():
            log = (options.output / f"{variant.name}.log").read_text(encoding="utf-8", errors="replace")
            print(f"{variant.name} ended with code {code}:\n{log[-1500:]}", file=sys.stderr)
            continue
        results[variant.name] = json.loads(summary.read_text(encoding="utf-8"))
    print(table(results))
    last_json({name: {"last": result["last"], "tokens": result["tokens"]} for name, result in results.items()})
    return 0 if len(results) == len(variants) else 1


def _start(options: Options, variant: Variant, index: int) -> subprocess.Popen[bytes]:
    assert options.output is not None
    command = [sys.executable, "-m", "looped", "train", "--config", str(variant.recipe)]
    command += ["--output", str(options.output / variant.name), "--overwrite", "--finish"]
    command += ["--max-seconds", str(options.seconds)]
    if options.data is not None:
        command += ["--data.folder", str(options.data)]
    command += options.flags.split()
    for key, value in variant.changes.items():
        command += [f"--{key.replace('_', '-')}={value}"]
    environment = dict(os.environ)
    if options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(index % options.gpus)
    with (options.output / f"{variant.name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def table(results: dict[str, Any]) -> str:
    """One line a run: tokens, speed, CE by depth on answers and on direct answers, exits and what they are worth."""
    lines = ["run | Mtok | Ktok/s | answer CE by depth | direct CE by depth | e.5 depth | gain | corr | pi | ragged"]
    for name, result in results.items():
        scores = result.get("scores") or {}
        curve = scores.get("ce", {})
        curves = {kind: "/".join(f"{x:.3f}" for x in curve.get(kind, ())) for kind in ("answer", "direct")}
        half = [e for e in scores.get("exits", ()) if e["tokens"] == "answer" and e["threshold"] in (0.5, 0.1)]
        end = half[0] if half else None
        cells = [name, f"{result['tokens'] / 1e6:.1f}", f"{result['last'].get('tok_s', 0) / 1e3:.0f}"]
        cells += [curves["answer"], curves["direct"]]
        if end is not None:
            cells += [f"{end['mean_depth']:.2f}", f"{end['adaptive_gain']:+.4f}", f"{end['gain_correlation']:+.2f}"]
            cells.append("/".join(f"{x:.2f}" for x in scores.get("mean_pi") or end["histogram"]))
            cells.append("-" if end["ragged_ce"] is None else f"{end['ragged_ce']:.3f}@{end['ragged_depth']:.2f}")
        lines.append(" | ".join(cells))
        for score in result.get("accuracy", ()):
            lines.append(
                f"    {score['task']} {score['num_fewshot']}-shot depth {score['depth']} {score['layout']}: "
                f"{score['accuracy']:.3f} (unanswered {score['unanswered']:.2f})"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse(Options, sys.argv[1:] if argv is None else argv, "python -m looped.train.pretrain.screen"))
    except HelpRequested as text:
        print(text)
        return 0
    except LoopedError as error:
        print(f"looped: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
