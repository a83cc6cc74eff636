"""Checkpoints on disk: official safetensors names, one file or sharded, in any float dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from looped.errors import LoopedError
from looped.files import read_object, whole
from looped.model.looped_lm import LoopedLM
from looped.model.mapping import Piece

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index where it is sharded."""
    if (folder / INDEX).exists():
        shards = read_object(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise LoopedError(f"{folder / INDEX} has no weight_map from tensors to shards")
        names = sorted(set(shards.values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise LoopedError(f"{folder} lacks the shard {missing[0]} that its index names")
        return [folder / name for name in names]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise LoopedError(f"{folder} holds no {SINGLE} and no {INDEX}; weights are read from safetensors only")


def tensor_names(files: list[Path]) -> set[str]:
    """Names of all tensors in the files."""
    names: set[str] = set()
    for path in files:
        with _open(path) as file:
            names.update(file.keys())
    return names


def read_into(model: LoopedLM, pieces: list[Piece], files: list[Path]) -> None:
    """Copy the official tensors into the model's parameters, one at a time, so no second copy of the model exists."""
    params = dict(model.named_parameters(remove_duplicate=False))
    table = {piece.official: piece for piece in pieces}
    filled: set[str] = set()
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict: iterating the handle is not allowed)
                piece = table.get(name)
                if piece is None or piece.param not in params:
                    continue
                _copy(params[piece.param], piece, file.get_tensor(name))
                filled.add(name)
    tied = {"lm_head.weight"} if model.config.tie_embeddings else set()
    missing = sorted(set(table) - filled - tied)
    if missing:
        raise LoopedError(f"the checkpoint lacks {len(missing)} tensors, {missing[0]} first")


def _copy(param: torch.Tensor, piece: Piece, value: torch.Tensor) -> None:
    target = param[piece.start : piece.stop]
    if target.shape != value.shape:
        raise LoopedError(
            f"tensor {piece.official} has shape {list(value.shape)}, config.json asks for {list(target.shape)}"
        )
    with torch.no_grad():
        target.copy_(value)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise LoopedError(f"{path} is truncated or not a safetensors file ({error})") from error


def write(model: LoopedLM, pieces: list[Piece], path: Path, dtype: torch.dtype | None = None) -> None:
    """Write the official tensors of a model to one file, whole or not at all."""
    params = dict(model.named_parameters(remove_duplicate=False))
    tensors = {
        piece.official: params[piece.param][piece.start : piece.stop].detach().to("cpu", dtype, copy=True).contiguous()
        for piece in pieces
        if piece.param in params
    }
    with whole(path) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
