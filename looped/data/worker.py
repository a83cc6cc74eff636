"""A data worker: `python -m looped.data.worker FOLDER INDEX WORKERS SHARDS` packs every WORKERS-th shard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from looped.data import tokenizer
from looped.data.build import write_shard
from looped.data.mixture import DataConfig, Mix, Sources
from looped.data.packing import Packer


def main(folder: Path, index: int, workers: int, shards: int) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    fields = job["config"]
    config = DataConfig(**{**fields, "mix": Mix(**fields["mix"]), "text": tuple(fields["text"])})
    gsm8k, text = job["sources"]
    sources = Sources(tuple((document, digits) for document, digits in gsm8k), tuple(text))
    packer = Packer(tokenizer.load(config.tokenizer), config)
    for shard in range(index, shards, workers):
        counts, rows = write_shard(packer, sources, job["means"], folder, shard, job["rows"])
        print(json.dumps({"counts": counts, "rows": rows}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
