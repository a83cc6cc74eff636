"""Tasks as lm-evaluation-harness runs them: its prompts, filters and metric, on data from a file or a shipped set."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse
from urllib.request import getproxies

import datasets
import lm_eval.tasks
import lm_eval.utils
from datasets import Dataset, DatasetDict
from huggingface_hub import constants
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from looped.errors import LoopedError
from looped.eval.result import FLEXIBLE, STRICT, Protocol
from looped.eval.tasks import GSM8K, GSM8K_FILE, HARNESS, check_task, read_rows, task_files

DEFAULT_MAX_GEN_TOKS = 256


class LoadedTask(NamedTuple):
    """A task ready to be scored, as often as wanted."""

    task: GridTask
    protocol: Protocol


class GridTask(ConfigurableTask):
    """A task of the library whose requests are built once and serve every setting of a grid.

    `rows` replace the data that the configuration names.
    """

    def __init__(self, config: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> None:
        self._rows = rows
        self._built_for: tuple[object, ...] | None = None
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._rows is not None:
            self.dataset = DatasetDict({"test": Dataset.from_list(self._rows)})
            return
        if callable(self.config.custom_dataset):
            super().download(dataset_kwargs, **kwargs)
            return
        try:
            with _offline_unless_reachable():
                super().download(dataset_kwargs, **kwargs)
        except Exception as error:  # the library raises a different class for every way a download can fail
            raise LoopedError(
                f"the data set {self.config.dataset_path} is not on this machine and cannot be fetched "
                f"({type(error).__name__}); give its test split with --data PATH (JSONL with question and answer)"
            ) from error

    def build_all_requests(self, *, limit: int | None = None, **options: Any) -> None:
        asked = (limit, *sorted((name, repr(value)) for name, value in options.items()))
        if asked != self._built_for:
            with contextlib.redirect_stderr(io.StringIO()):  # its bar; the engine shows one of ours
                super().build_all_requests(limit=limit, **options)
            self._built_for = asked
        for instance in self._instances:
            instance.resps, instance.filtered_resps = [], {}


@contextlib.contextmanager
def _offline_unless_reachable() -> Iterator[None]:
    """Where the hub's name does not resolve, look in the local cache at once instead of half a minute of retries."""
    if getproxies() or _resolves(urlparse(constants.ENDPOINT).hostname or ""):
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def quiet() -> None:
    """Keep the library's errors and drop the rest of its log, unless LMEVAL_LOG_LEVEL asks for it."""
    if not os.environ.get("LMEVAL_LOG_LEVEL"):
        logging.getLogger("lm_eval").setLevel(logging.ERROR)


def compile_once() -> None:
    """Keep the library's compiled templates: it compiles a task's anew for every document, which costs seconds."""
    env = getattr(lm_eval.utils, "env", None)
    if env is not None and not hasattr(env.from_string, "cache_info"):
        env.from_string = functools.lru_cache(maxsize=256)(env.from_string)


def load_task(
    name: str,
    data: str | Path | None = None,
    num_fewshot: int | None = None,
    max_gen_toks: int = DEFAULT_MAX_GEN_TOKS,
) -> LoadedTask:
    """A task by name. `data`: a file in place of its own data. `num_fewshot`: None takes the task's own number.

    Raises `LoopedError` for an unknown task, unusable data, or more exemplars than the task has.
    """
    quiet()
    compile_once()
    name = check_task(name)
    if max_gen_toks < 1:
        raise LoopedError(f"max_gen_toks must be at least 1, got {max_gen_toks}")
    rows = None if data is None else read_rows(data)
    source = Path(lm_eval.tasks.__file__).parent / GSM8K_FILE if name == GSM8K else task_files()[name]
    config = load_yaml(source)
    config.pop("tag", None)
    config["generation_kwargs"] = {**config.get("generation_kwargs", {}), "max_gen_toks": max_gen_toks}
    if num_fewshot is not None:
        _check_fewshot(num_fewshot, config)
        config["num_fewshot"] = num_fewshot
    _check_scores(name, config)
    task = GridTask(config, rows)
    task.set_fewshot_seed(1234)  # the library's default
    return LoadedTask(task, _protocol(name, task, data))


def _check_fewshot(num_fewshot: int, config: dict[str, Any]) -> None:
    samples = config.get("fewshot_config", {}).get("samples")
    most = len(samples) if isinstance(samples, list) else num_fewshot
    if not 0 <= num_fewshot <= most:
        raise LoopedError(f"num_fewshot must be between 0 and {most}, the exemplars of this task; got {num_fewshot}")


def _check_scores(name: str, config: dict[str, Any]) -> None:
    """A result has two scores by name; a task file without them belongs to the library's own command line."""
    filters = {item["name"] for item in config.get("filter_list") or []}
    metrics = {item["metric"] for item in config.get("metric_list") or []}
    if not {STRICT, FLEXIBLE} <= filters or "exact_match" not in metrics:
        raise LoopedError(f"the task {name} has no exact_match by {STRICT} and {FLEXIBLE}; run it with {HARNESS}")


def _protocol(name: str, task: GridTask, data: str | Path | None) -> Protocol:
    config = task.config
    shipped_data = f"eval/ ({name})" if config.custom_dataset is not None else f"{config.dataset_path} (hub)"
    return Protocol(
        task=name,
        harness_task=str(config.task),
        version=task.VERSION,
        num_fewshot=int(config.num_fewshot or 0),
        filters=tuple(item["name"] for item in config.filter_list),
        until=tuple(config.generation_kwargs["until"]),
        max_gen_toks=int(config.generation_kwargs["max_gen_toks"]),
        data=shipped_data if data is None else str(data),
    )
