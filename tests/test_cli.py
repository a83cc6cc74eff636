"""The command: verbs, lazy imports, exit codes, errors in one sentence."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import looped
from looped import cli as command
from looped.errors import LoopedError
from looped.files import whole
from looped.options import argument, option
from tests.conftest import REPOSITORY, Ran

HEAVY = ("torch", "numpy", "transformers", "lightning", "datasets", "lm_eval", "fastapi", "yaml")
Cli = Callable[..., Ran]


@dataclass(frozen=True)
class EchoOptions:
    """Say a word.

    At length.
    """

    word: str = argument("what to say")
    times: int = option(1, "how often")


def echo(options: EchoOptions) -> int:
    print(" ".join([options.word] * options.times))
    return 0


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A verb `echo` of its own module, to be changed by the test."""
    module = ModuleType("echo_verb")
    module.Options, module.run = EchoOptions, echo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "echo_verb", module)
    monkeypatch.setitem(command.VERBS, "echo", command.Verb("echo_verb", "say a word", "serve"))
    return module


def run_verb(module: ModuleType, run: Callable[[EchoOptions], int]) -> None:
    module.run = run  # type: ignore[attr-defined]


def imported(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `code`."""
    code += "\nimport sys; print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_and_help_load_nothing_heavy() -> None:
    assert not imported("import looped; dir(looped)") & set(HEAVY)
    assert not imported("from looped.cli import main; main(['--help'])") & set(HEAVY)


def test_the_engine_needs_no_library_of_an_extra() -> None:
    loaded = imported("import looped.model, looped.gates, looped.decode, looped.infer")
    assert not loaded & {"accelerate", "datasets", "fastapi", "lightning", "lm_eval", "transformers", "uvicorn"}


def test_help_is_fast_and_lists_every_verb(cli_process: Cli) -> None:
    seconds = []
    for _ in range(3):  # the best of three: other processes share the machine
        begun = time.perf_counter()
        ran = cli_process("--help")
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.5
    assert ran.code == 0 and ran.err == ""
    for name in ("generate", "serve", "eval", "bench", "train-gate", "train", "demo", "info"):
        assert f"\n  {name} " in ran.out


@pytest.mark.parametrize("name", list(command.VERBS))
def test_help_of_every_verb_loads_no_torch(name: str) -> None:
    if importlib.util.find_spec(command.VERBS[name].module) is None:
        pytest.skip(f"{command.VERBS[name].module} is not part of this build")
    assert "torch" not in imported(f"from looped.cli import main; assert main([{name!r}, '--help']) == 0")


def test_version_and_no_verb(cli: Cli) -> None:
    assert cli("--version").out == f"looped {looped.__version__}\n"
    ran = cli()
    assert ran.code == 2 and ran.err.startswith("usage: looped VERB")


def test_a_verb_runs_with_its_options(cli: Cli, verb: ModuleType) -> None:
    assert cli("echo", "hi", "--times", 2) == Ran(0, "hi hi\n", "")
    assert cli("echo", "--help").out.startswith("usage: looped echo WORD [flags]\n\nSay a word.\n\nAt length.\n")
    assert cli("echo", "hi", "--tims", 2).refusal.startswith("unknown flag --tims; did you mean --times?")


def test_unknown_verb_suggests(cli: Cli) -> None:
    assert cli("evl").refusal.startswith("unknown verb 'evl'; did you mean 'eval'?")


def test_sub_verbs(cli: Cli, verb: ModuleType) -> None:
    verb.VERBS = {"loudly": (EchoOptions, echo)}  # type: ignore[attr-defined]
    assert cli("echo", "loudly", "hi").out == "hi\n"
    assert "\n  loudly  Say a word.\n" in cli("echo").out
    assert cli("echo", "loudli", "hi").refusal.startswith("unknown looped echo verb 'loudli'; did you mean 'loudly'?")


def test_a_users_error_is_one_sentence(cli: Cli, verb: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(options: EchoOptions) -> int:
        raise LoopedError("the word is too long; give a shorter one")

    run_verb(verb, refuse)
    assert cli("echo", "hi").refusal == "the word is too long; give a shorter one"
    monkeypatch.setenv("LOOPED_DEBUG", "1")
    with pytest.raises(LoopedError):
        cli("echo", "hi")


def test_a_bug_keeps_its_traceback(cli: Cli, verb: ModuleType) -> None:
    run_verb(verb, lambda options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli("echo", "hi")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOTDIR])
def test_what_the_file_system_refuses_is_one_sentence(cli: Cli, verb: ModuleType, number: int) -> None:
    def write(options: EchoOptions) -> int:
        raise OSError(number, os.strerror(number), "out/model.safetensors")

    run_verb(verb, write)
    assert cli("echo", "hello").refusal == f"{os.strerror(number)}: out/model.safetensors"


def test_another_failure_of_the_system_keeps_its_traceback(cli: Cli, verb: ModuleType) -> None:
    def write(options: EchoOptions) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run_verb(verb, write)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        cli("echo", "hello")


def test_a_missing_library_names_the_extra(cli: Cli, verb: ModuleType) -> None:
    def needs(name: str) -> Callable[[EchoOptions], int]:
        return lambda options: int(importlib.import_module(name) is None)

    run_verb(verb, needs("a_library_nobody_has"))
    assert cli("echo", "hi").refusal == (
        "looped echo needs the package 'a_library_nobody_has'; install it with: pip install 'looped[serve]'"
    )
    run_verb(verb, needs("looped.no_such_module"))  # a bug, not a missing extra
    with pytest.raises(ModuleNotFoundError):
        cli("echo", "hi")


def test_interrupt(cli: Cli, verb: ModuleType) -> None:
    def interrupted(options: EchoOptions) -> int:
        raise KeyboardInterrupt

    run_verb(verb, interrupted)
    assert cli("echo", "hi") == Ran(130, "", "\nlooped: interrupted\n")


def test_sigterm_unwinds_as_an_interrupt_does(cli: Cli, verb: ModuleType, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(options: EchoOptions) -> int:
        with whole(tmp_path / "result") as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        return 0

    run_verb(verb, terminated)
    assert cli("echo", "hi") == Ran(143, "", "\nlooped: terminated\n")
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_in_a_finalizer_is_not_lost(cli: Cli, verb: ModuleType) -> None:
    class Terminating:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)

    def terminated(options: EchoOptions) -> int:
        Terminating()
        time.sleep(10)
        return 0

    run_verb(verb, terminated)
    assert cli("echo", "hi").code == 143


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys, types, dataclasses\nfrom looped import cli\n"
        "Options = dataclasses.make_dataclass('Options', [])\n"
        "def run(options):\n    for _ in range(100000): print('line')\n    return 0\n"
        "sys.modules['many'] = module = types.ModuleType('many'); module.Options, module.run = Options, run\n"
        "cli.VERBS['many'] = cli.Verb('many', '')\nsys.exit(cli.main(['many']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == command.EXIT_PIPE
    process.stderr.close()


def test_lazy_names_are_what_their_modules_define() -> None:
    for name, home in looped._HOMES.items():
        if importlib.util.find_spec(home) is None:
            pytest.skip(f"{home} is not part of this build")
        assert getattr(looped, name) is getattr(importlib.import_module(home), name)
    assert set(looped._HOMES) | {"LoopedError", "__version__"} == set(looped.__all__)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        looped.laod  # noqa: B018


def test_warnings_are_one_line(cli_process: Callable[..., Ran]) -> None:
    ran = cli_process("generate", "Q: 2 + 2 = ?\nA:", "--max-loops", "5", "--max-tokens", "1", "--temperature", "0")
    assert ran.code == 0
    assert "looped: warning: max_loops = 5 is above the 4 loops of training\n" in ran.err
    assert "loading.py" not in ran.err
