"""Writes the packed training set: `tokens.npy` and `mask.npy`, filled by worker processes; the manifest comes last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from looped.data import tokenizer as tokenizers_
from looped.data.mixture import DataConfig, Sources, read_sources
from looped.data.packing import Packer
from looped.errors import LoopedError
from looped.files import write_text

SHARD_ROWS = 128
"""Windows of one unit of work. Part of the result: shard k holds rows k * SHARD_ROWS and on."""
MANIFEST = "manifest.json"

Progress = Callable[[int, int], None]
"""Called with windows done and windows in all."""


def build_dataset(config: DataConfig, progress: Progress | None = None) -> Path:
    """The folder of the packed set, built unless it already holds the same one.

    Raises LoopedError where the folder holds something else, or a source is missing.
    """
    sources = read_sources(config)
    identity = _identity(config, sources)
    folder = Path(config.folder)
    if (folder / MANIFEST).is_file():
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if found.get("identity") == identity:
            return folder
        raise LoopedError(f"{folder} holds another packed data set; give another folder or remove it.")
    foreign = [p.name for p in folder.iterdir() if p.name not in _OWN] if folder.is_dir() else []
    if foreign:
        raise LoopedError(f"{folder} is not empty ({foreign[0]} is in it); give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    _fill(config, sources, identity, folder, progress)
    return folder


_OWN = {"tokens.npy", "mask.npy", "job.json", MANIFEST}


def _identity(config: DataConfig, sources: Sources) -> str:
    """Hash of everything the result depends on: not of the folder or the number of workers."""
    same = asdict(replace(config, folder="", workers=0, tokenizer=None, gsm8k=None, text=()))
    path = Path(config.tokenizer) if config.tokenizer else tokenizers_.folder()
    words = sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    return sha256(json.dumps([same, sources.digest(), words, SHARD_ROWS]).encode()).hexdigest()


def _fill(config: DataConfig, sources: Sources, identity: str, folder: Path, progress: Progress | None) -> None:
    width = config.seq_len + 1
    rows = max(1, -(-config.tokens // width))
    shards = -(-rows // SHARD_ROWS)
    packer = Packer(tokenizers_.load(config.tokenizer), config)
    means = packer.mean_tokens(sources)
    for name, kind in (("tokens.npy", np.uint16), ("mask.npy", np.uint8)):
        np.lib.format.open_memmap(folder / name, mode="w+", dtype=kind, shape=(rows, width)).flush()
    job = {"config": asdict(config), "sources": sources, "means": means, "folder": str(folder.resolve()), "rows": rows}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    workers = min(shards, config.workers or os.cpu_count() or 1)
    counts = Counter[str]()
    done = 0
    lock = threading.Lock()

    def finished(shard_counts: dict[str, int], shard_rows: int) -> None:
        nonlocal done
        with lock:
            counts.update(shard_counts)
            done += shard_rows
            if progress:
                progress(done, rows)

    if workers == 1:
        for shard in range(shards):
            finished(*write_shard(packer, sources, means, folder, shard, rows))
    else:
        _run_workers(folder, shards, workers, finished)
    (folder / "job.json").unlink()
    manifest = {
        "identity": identity,
        "config": asdict(replace(config, folder="")),
        "rows": rows,
        "seq_len": config.seq_len,
        "tokens": rows * width,
        "mean_tokens": {name: round(value, 1) for name, value in means.items()},
        "token_share": {name: round(count / (rows * width), 4) for name, count in sorted(counts.items())},
        "gsm8k_epochs": round(counts["gsm8k"] / (means["gsm8k"] * len(sources.gsm8k)), 2) if sources.gsm8k else 0,
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def write_shard(
    packer: Packer, sources: Sources, means: dict[str, float], folder: Path, shard: int, rows: int
) -> tuple[dict[str, int], int]:
    """Packs one shard into its rows of the two files; returns its token counts and number of rows."""
    first = shard * SHARD_ROWS
    count = min(SHARD_ROWS, rows - first)
    packed = packer.pack(sources, means, shard, count)
    for name, values in (("tokens.npy", packed.tokens), ("mask.npy", packed.mask)):
        np.load(folder / name, mmap_mode="r+")[first : first + count] = values
    return packed.counts, count


def _run_workers(folder: Path, shards: int, workers: int, finished: Callable[[dict[str, int], int], None]) -> None:
    """Plain child processes: no fork of a process that may hold threads or a GPU, no re-import of the caller's main."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "looped.data.worker", str(folder), str(i), str(workers), str(shards)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for i in range(workers)
    ]

    def listen(child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            finished(message["counts"], message["rows"])

    threads = [threading.Thread(target=listen, args=(child,)) for child in children]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = [child.wait() for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
    if any(codes):
        raise RuntimeError(f"a data worker ended with code {next(code for code in codes if code)}; its error is above")
