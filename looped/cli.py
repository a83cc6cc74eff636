"""The command `looped`: a table of verbs. A verb's module is imported only when the verb is used.

A verb is a row in VERBS and a module with `Options` (see looped/options.py) and `run(options) -> exit code`. A module
with sub-verbs has `VERBS: dict[str, tuple[Options, run]]` instead. Modules import what is heavy inside `run`, so that
`looped VERB --help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from looped import __version__
from looped.errors import LoopedError, unknown
from looped.options import HelpRequested, parse


class Verb(NamedTuple):
    """Where a verb lives, what it does in one line, and the extra that installs what it needs beyond the core."""

    module: str
    help: str
    extra: str = ""


VERBS = {
    "generate": Verb("looped.generate_cli", "continue a text; tokens are coloured by exit depth"),
    "serve": Verb("looped.server.serve", "OpenAI-compatible HTTP server over the engine", "serve"),
    "eval": Verb("looped.eval.run", "score a model on a task under a KV layout and a gate", "eval"),
    "bench": Verb("looped.analysis.bench", "measure the engine against its bound"),
    "record": Verb("looped.analysis.record", "exits of reference answers at every threshold, to replay in a bench"),
    "trace": Verb("looped.analysis.trace", "a run's schedule, stage by stage, with or without a model"),
    "train-gate": Verb("looped.train.gates.run", "distil an exit gate on a frozen model", "train"),
    "train": Verb("looped.train.pretrain.run", "train a looped model from a recipe", "train"),
    "report": Verb("looped.train.pretrain.report", "curves, tables and coloured texts of training runs", "train"),
    "demo": Verb("looped.demo", "the whole loop on tiny models: gates, scores, speed, a report", "serve,eval,train"),
    "info": Verb("looped.info", "a model's card: shape, parameters, bytes per token of every layout, gates"),
}
# What the file system refuses: a full or read-only disk, a folder without permission, a file where a folder is meant.
REFUSED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)
EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_TERMINATED = 2, 130, 141, 143


class Terminated(BaseException):
    """Raised in the main thread by SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a mistake of the user's or a refusing disk, 130 for Ctrl-C,
    143 for SIGTERM.

    An exception that is not a LoopedError is a bug of ours and keeps its traceback; LOOPED_DEBUG=1 shows it for both.
    """
    try:
        with _unwinding(), _plain_warnings():
            code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except HelpRequested as text:
        print(text)
        return 0
    except LoopedError as error:
        if os.environ.get("LOOPED_DEBUG"):
            raise
        print(f"looped: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("\nlooped: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Terminated:
        print("\nlooped: terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except BrokenPipeError:
        # The reader went away (`looped … | head`). Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except OSError as error:
        if error.errno not in REFUSED or os.environ.get("LOOPED_DEBUG"):
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"looped: error: {error.strerror}{where}", file=sys.stderr)
        return EXIT_USER_ERROR


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings meant for the user are one line, without a file and its code; those of libraries stay as they are."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
            if category is UserWarning:
                print(f"looped: warning: {message}", file=sys.stderr)
            else:
                shown(message, category, *where, **rest)

        warnings.showwarning = show
        yield


@contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM ends a command the way Ctrl-C does, so that what is half-written goes away; a second one ends it at once.

    Verbs may put their own handler over this one; forked workers end at once, as without it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    command = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != command:
            os._exit(EXIT_TERMINATED)
        if _in_finalizer(frame):  # where Python drops exceptions
            again = threading.Timer(0.05, os.kill, (command, number))
            again.daemon = True
            again.start()
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(_listing("looped", {name: verb.help for name, verb in VERBS.items()}), file=sys.stderr)
        return EXIT_USER_ERROR
    name, *rest = argv
    if name in ("-h", "--help"):
        raise HelpRequested(_listing("looped", {name: verb.help for name, verb in VERBS.items()}))
    if name == "--version":
        print(f"looped {__version__}")
        return 0
    if name not in VERBS:
        raise unknown("verb", name, VERBS)
    verb = VERBS[name]
    try:
        return _run(importlib.import_module(verb.module), rest, f"looped {name}")
    except ModuleNotFoundError as error:
        if not verb.extra or (error.name or "looped").split(".")[0] == "looped":
            raise
        raise LoopedError(
            f"looped {name} needs the package {error.name!r}; install it with: pip install 'looped[{verb.extra}]'"
        ) from error


def _run(module: ModuleType, argv: list[str], prog: str) -> int:
    subverbs: dict[str, tuple[type[Any], Any]] | None = getattr(module, "VERBS", None)
    if subverbs is None:
        return int(module.run(parse(module.Options, argv, prog)))
    lines = {name: (options.__doc__ or "").strip().partition("\n")[0] for name, (options, _) in subverbs.items()}
    if not argv or argv[0] in ("-h", "--help"):
        raise HelpRequested(_listing(prog, lines))
    name, *rest = argv
    if name not in subverbs:
        raise unknown(f"{prog} verb", name, subverbs)
    options, run = subverbs[name]
    return int(run(parse(options, rest, f"{prog} {name}")))


def _listing(prog: str, verbs: dict[str, str]) -> str:
    width = max(len(name) for name in verbs)
    lines = [f"usage: {prog} VERB [arguments] [flags]", ""]
    lines += [f"  {name:<{width}}  {text}" for name, text in verbs.items()]
    return "\n".join([*lines, "", f"{prog} VERB --help shows the flags of a verb."])
