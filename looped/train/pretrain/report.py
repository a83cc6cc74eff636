"""`looped report`: curves, tables and coloured texts of training runs, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from looped.errors import LoopedError
from looped.options import argument, option


@dataclass(frozen=True)
class Options:
    """Curves over training, tables and token traces of runs of `looped train`, side by side.

    Writes curves.svg and tables.md; and traces.html, in which the runs' models (those with an exit gate) read the same
    held-out texts, tokens coloured by the depth they left at.
    """

    runs: tuple[Path, ...] = argument("folders of runs, in the order they are shown")
    output: Path = option(Path("out/report"), "folder to write to")
    texts: int = option(3, "texts that the models read; 0 leaves traces.html out")
    threshold: float = option(0.5, "threshold of the exits that are coloured")
    device: str | None = option(None, "cpu or cuda; the first GPU when there is one")


def run(options: Options) -> int:
    """Write the files and name them. Raises LoopedError."""
    from looped.files import write_text
    from looped.train.pretrain.curves import curves
    from looped.train.pretrain.log import read_run
    from looped.train.pretrain.tables import tables

    if not 0 < options.threshold <= 1:
        raise LoopedError(f"--threshold must be above 0 and at most 1, got {options.threshold:g}")
    if options.texts < 0:
        raise LoopedError(f"--texts must be at least 0, got {options.texts}")
    runs = [read_run(folder) for folder in options.runs]
    options.output.mkdir(parents=True, exist_ok=True)
    files = {"curves.svg": curves(runs) + "\n", "tables.md": "\n".join(tables(one) for one in runs)}
    html = _traces(options) if options.texts else None
    if html is not None:
        files["traces.html"] = html
    for name, text in files.items():
        write_text(options.output / name, text)
        print(options.output / name)
    return 0


def _traces(options: Options) -> str | None:
    """The page of those runs whose models have been exported and have a gate; None where there is none."""
    from looped.model import load
    from looped.train.pretrain.log import read_run
    from looped.train.pretrain.traces import page, trace

    found = []
    for folder in options.runs:
        known = read_run(folder)
        if known.model is None:
            continue
        model = load(str(known.model), device=options.device, dtype="float32")
        if model.exit_gate is not None:
            found.append(trace(known.name, model, known.model, held_out_texts(options.texts), options.threshold))
    return page(found, options.threshold) if found else None


def held_out_texts(count: int) -> list[str]:
    """Problems and drills that no run trains on, eight to a text."""
    from looped.data.drills import drill_problems
    from looped.data.wordmath.generate import word_problems
    from looped.data.wordmath.words import Dice

    dice = Dice("report")
    words, drills = word_problems(dice, evaluation=True), drill_problems(dice, evaluation=True)
    return ["\n\n".join(next(drills if dice.chance(0.5) else words).document() for _ in range(8)) for _ in range(count)]
