"""`looped train-gate`: distil exit gates on a frozen teacher, find their thresholds, write their checkpoints."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped.train.gates.options import Options, check

if TYPE_CHECKING:
    from looped.train.gates.report import GateReport


def run(options: Options) -> int:
    """Distil, score, save; prints a table. Raises LoopedError for a mistake in the options."""
    from looped.progress import last_json
    from looped.train.gates.output import check_output
    from looped.train.gates.table import table

    begun = time.monotonic()
    check(options)
    if options.dry_run:
        from looped.train.gates.train import measure

        return measure(options)
    if options.calibrate is not None:
        from looped.train.gates.recalibrate import calibrate_again

        reports, folder = [calibrate_again(options)], options.calibrate
        saved = f"thresholds and metrics are in {folder / 'gate.json'}"
    else:
        folder = check_output(options.output, options.resume, options.overwrite, options)
        from looped.train.gates.train import train_gates

        reports = train_gates(options, folder)
        saved = f"saved to {folder}, with report.json and report.svg"
    print(table(reports, saved))
    if options.json:
        last_json(summary(options, reports, folder, time.monotonic() - begun))
    return 0


def summary(options: Options, reports: list[GateReport], folder: Path, seconds: float) -> dict[str, Any]:
    """What `--json` prints: the report of the first gate, and all of them by name where there are several."""
    from looped.train.gates.output import rounded

    plain = [rounded(dataclasses.asdict(report)) for report in reports]
    result: dict[str, Any] = dict(plain[0])
    if len(reports) > 1:
        result["gates"] = {report["gate"]: report for report in plain}
    return result | {"teacher": options.teacher, "output": str(folder), "seconds": round(seconds, 1)}
