"""From a name to a model: the embedded tiny models, known hub checkpoints, any hub id, any folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from looped.config import ModelConfig
from looped.errors import LoopedError, shown, unknown
from looped.files import read_object, write_text
from looped.model import huginn, ouro, weights
from looped.model.looped_lm import LoopedLM
from looped.model.mapping import ids
from looped.model.tokenizer import find_tokenizer

ASSETS = Path(__file__).parent.parent / "assets"
EMBEDDED = ("tiny-ouro", "tiny-huginn")
HUB_IDS = {
    "ouro-1.4b": "ByteDance/Ouro-1.4B",
    "ouro-2.6b": "ByteDance/Ouro-2.6B",
    "ouro-1.4b-thinking": "ByteDance/Ouro-1.4B-Thinking",
    "ouro-2.6b-thinking": "ByteDance/Ouro-2.6B-Thinking",
    "huginn": "tomg-group-umd/huginn-0125",
}
ALIASES = {"ouro": "ouro-1.4b"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
FAMILIES: dict[str, ModuleType] = {"ouro": ouro, "huginn_raven": huginn}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load(
    name_or_path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    max_loops: int | None = None,
) -> LoopedLM:
    """Load a looped LM by name, hub id or folder.

    `device` None takes the first GPU, else the CPU. `max_loops` sets R; above what the checkpoint was trained with it
    warns. Raises `LoopedError` for an unknown name or device, an unreachable hub, an unsupported or damaged
    checkpoint.
    """
    torch_dtype, torch_device = parse_dtype(dtype), parse_device(device)
    folder = find_checkpoint(name_or_path)
    config, family = read_config(folder)
    config = config.with_loops(max_loops)
    if max_loops is not None and max_loops > config.trained_loops:
        warnings.warn(f"max_loops = {max_loops} is above the {config.trained_loops} loops of training", stacklevel=2)
    files = weights.weight_files(folder)
    family.check_tensor_names(weights.tensor_names(files))
    with torch.device("meta"):
        model = LoopedLM(config)
    model = model.to(dtype=torch_dtype).to_empty(device=torch_device)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    weights.read_into(model, family.weight_map(config), files)
    model.name = str(name_or_path).lower() if str(name_or_path).lower() in known_names() else folder.name
    model._load_tokenizer = partial(find_tokenizer, folder, config.eos_ids)
    return model


def save(model: LoopedLM, folder: str | Path, dtype: str | torch.dtype | None = None) -> None:
    """Write a checkpoint folder with official names: `config.json`, `model.safetensors`, the tokenizer's files."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    family = next(module for module in FAMILIES.values() if module.__name__.endswith(model.config.family))
    weights.write(
        model,
        family.weight_map(model.config),
        out / weights.SINGLE,
        None if dtype is None else parse_dtype(dtype),
    )
    write_text(out / "config.json", json.dumps(family.config_to_hf(model.config), indent=2) + "\n")
    if model.tokenizer is not None and model.tokenizer.folder.resolve() != out.resolve():
        copy_tokenizer(model.tokenizer.folder, out)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files of a checkpoint folder, those that it has."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def parse_device(device: str | torch.device | None) -> torch.device:
    """A torch device from `cpu`, `cuda` or `cuda:N`; None is the first GPU, else the CPU.

    Raises `LoopedError` where there is no such device here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu(?::0)?|cuda(?::(\d{1,4}))?", str(device))
    if not match:
        raise LoopedError(f"unknown device {shown(str(device))}; give cpu, cuda or cuda:N")
    if match[0].startswith("cuda") and int(match[1] or 0) >= torch.cuda.device_count():
        raise LoopedError(f"there is no device {str(device)!r} here ({torch.cuda.device_count()} GPUs found); use cpu")
    return torch.device(device)


def known_names() -> list[str]:
    """Names that `load` takes beside hub ids and folders."""
    return [*EMBEDDED, *HUB_IDS, *ALIASES]


def find_checkpoint(name_or_path: str | Path) -> Path:
    """The folder of a checkpoint: embedded, local, or downloaded from (or cached by) the hub."""
    name = str(name_or_path)
    lower = ALIASES.get(name.lower(), name.lower())
    if lower in EMBEDDED:
        folder = ASSETS / lower
        if not (folder / "config.json").exists():
            raise LoopedError(f"the embedded model {lower} is missing from this installation")
        return folder
    path = Path(name)
    if os.path.isdir(name):  # False for names that no file can have, where pathlib raises
        if not (path / "config.json").exists():
            raise LoopedError(f"{path} holds no config.json, so it is not a checkpoint folder")
        return path
    if os.path.exists(name):
        raise LoopedError(f"{path} is a file; give the folder that holds config.json and the safetensors files")
    if lower in HUB_IDS:
        return _download(HUB_IDS[lower])
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name)
    raise unknown("model", name, known_names())


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # offline, unknown id, no access: the hub's many exception types mean one thing here
        raise LoopedError(
            f"{hub_id} is not in the local cache and the hub could not be reached ({type(error).__name__}); "
            "connect once, or download the checkpoint elsewhere and give its folder"
        ) from error


def read_config(folder: Path) -> tuple[ModelConfig, ModuleType]:
    """A checkpoint's configuration and its family module; a look-alike family is refused by name."""
    raw = read_object(folder / "config.json")
    kind = raw.get("model_type")
    if kind == "nanbeige":
        raise LoopedError("Nanbeige checkpoints are not supported; supported families: Ouro, Huginn")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise LoopedError(f"config.json has model_type {kind!r}; supported: {', '.join(map(repr, FAMILIES))}")
    config: ModelConfig = FAMILIES[kind].config_from_hf(raw)
    if (folder / "generation_config.json").exists():
        extra = ids(read_object(folder / "generation_config.json").get("eos_token_id"))
        config = replace(config, eos_ids=tuple(dict.fromkeys(config.eos_ids + extra)))
    return config, FAMILIES[kind]
