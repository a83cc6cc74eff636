"""The newest figures of a run in one line, with signs that its depth is not being used."""

from __future__ import annotations

from looped.train.pretrain.guards import warnings


def progress_line(last: dict[str, float], loops: int) -> str:
    """`step 50 10.0% | loss 2.3141 | ...` of the figures that were logged last, for a model of R = `loops`."""

    def curve(name: str, digits: int = 3) -> str:
        present = [last.get(f"{name}_{d}") for d in range(1, loops + 1)]
        return "/".join("-" if value is None else f"{value:.{digits}f}" for value in present)

    answers = any("answer" in name for name in last)  # plain text has none
    parts = [
        f"step {last['step']:.0f} {last['progress']:.1%}",
        f"loss {last.get('loss', last.get('ragged_loss', 0.0)):.4f}",
    ]
    if answers:
        parts += [f"answer {curve('answer_ce')}", f"direct {curve('direct_ce')}"]
    else:
        parts += [f"ce {curve('ce')}"]
    if "pi_1" in last:
        parts += [f"pi {curve('pi', 2)}", f"H {last['entropy']:.2f}", f"exit {last['exit_depth']:.2f}"]
        gain = "answer_gain" if answers else "adaptive_gain"
        parts += [f"gain {last[gain]:+.4f}", f"corr {last['gain_correlation']:+.2f}"]
        parts += [f"drift {curve('drift', 2)}"]
    elif any(name.startswith("change_") for name in last):
        parts += [f"change {curve('change', 2)}"]
    if "ragged_depth" in last:
        parts += [f"ragged {last['ragged_answer' if answers else 'ragged_loss']:.3f}@{last['ragged_depth']:.2f}"]
    parts += [f"norm {last['grad_norm']:.2f}", f"lr {last['lr']:.2e}", f"{last['tok_s'] / 1e3:.0f}K tok/s"]
    return " | ".join([*parts, f"MFU {last['mfu']:.0%}", f"{last['memory_gib']:.0f} GiB", *warnings(last, loops)])
