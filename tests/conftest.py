"""Fixtures for every test. Set before torch is imported: one thread per process, and no test reaches the network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported: kernels run on the CPU, slowly.
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


class Ran(NamedTuple):
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The one sentence of a refused command; fails the test if the command was not refused that way."""
        assert self.code == 2, self
        assert self.err.startswith("looped: error: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("looped: error: ").rstrip()


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """`shared("fixtures/ouro_tiny.json")`: a file beside the repository; the test skips where it is absent."""

    def path(name: str) -> Path:
        if not (SHARED / name).exists():
            pytest.skip(f"shared/{name} is not beside the repository")
        return SHARED / name

    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`cli("eval", "gsm8k", ...)` runs the command in this process: fast, no new interpreter."""
    from looped.cli import main

    def run(*words: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def cli_process() -> Callable[..., Ran]:
    """The same in an interpreter of its own, as a person runs it."""

    def run(*words: object, timeout: float = 120) -> Ran:
        command = [sys.executable, "-m", "looped", *(str(word) for word in words)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
