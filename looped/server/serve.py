"""`looped serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from looped.errors import LoopedError
from looped.options import option
from looped.server.choices import COSINE_DOC, GATE_DOC, NATIVE, PROTECTED_DOC, check_prefill, prefill_schedule, say

if TYPE_CHECKING:
    from looped.infer.options import EngineOptions
    from looped.server.engine_thread import EngineInfo

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True)
class Options:
    """Serve a model over HTTP with the OpenAI API: /v1/completions, /v1/chat/completions, /v1/models."""

    model: str = option("tiny-ouro", "name, hub id or folder")
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    mode: str = option("refill", "scheduler: refill, no-refill or cb")
    kv: str | None = option(None, "KV layout; the model's own when left out")
    gate: str = option(NATIVE, GATE_DOC)
    threshold: float | None = option(None, "exit threshold where a request gives none; the gate's when left out")
    min_depth: int | None = option(None, "fewest loops of a token; the gate's when left out")
    depth: int | None = option(None, "run with fewer loops, prompt and decode alike")
    compute: str = option("sparse", "dense runs all loops and lets the gate pick the output only")
    prefill: str = option("dense", "ragged lets prompt tokens leave early")
    prefill_threshold: float | None = option(None, "exit threshold of a ragged prefill; that of decode when left out")
    prefill_cosine: bool = option(False, COSINE_DOC)
    prefill_protected: int = option(0, PROTECTED_DOC)
    mix_prefill: bool = option(False, "pieces of prompts ride along with core steps")
    exits: str = option("auto", "how the host learns of exits: sync, lookahead, device; auto: device on a GPU")
    max_loops: int | None = option(None, "R, where it differs from the checkpoint's")
    max_num_seqs: int = option(64, "sequences that run at once (W)")
    max_num_batched_tokens: int = option(8192, "prompt tokens of one batch (M)")
    chunk_size: int | None = option(None, "prompts are cut at its multiples")
    min_free_slots: int | None = option(None, "free slots before a prompt interrupts decode (S)")
    min_coda_batch: int | None = option(None, "exits before the coda runs (K)")
    kv_headroom: float = option(0.0, "share of the KV pool kept free at admission")
    num_pages: int | None = option(None, "pages of the KV pool; what memory allows when left out")
    page_size: int | None = option(None, "tokens of a page")
    preemption: str = option("auto", "what makes room when the pool is full: auto, recompute, offload or off")
    prefix_caching: bool = option(False, "prompts share the K/V of equal beginnings")
    backend: str = option("auto", "attention backend")
    graphs: bool = option(True, "CUDA graphs")
    device: str | None = option(None, "cpu or cuda; the first GPU when left out, else the CPU")
    dtype: str = option("float32", "float32, bfloat16 or float64")
    seed: int = option(0, "for greedy requests without a seed")
    served_model_name: tuple[str, ...] = option((), "names that clients may use, separated by commas")
    api_key: tuple[str, ...] | None = option(
        None, "keys that clients must send, separated by commas; also LOOPED_API_KEY"
    )
    max_body_mib: float = option(32.0, "largest request body")
    drain_seconds: float = option(30.0, "how long running requests may go on after SIGTERM")
    uvicorn_log_level: str = option("warning", "log level of the HTTP server", choices=LOG_LEVELS)


def run(options: Options) -> int:
    """Serve until a signal. Returns 0 after a signal, 1 after the engine died; raises what loading refused."""
    check(options)
    engine = engine_options(options)
    sock = bind(options.host, options.port)
    url = f"http://{_bracketed(options.host)}:{sock.getsockname()[1]}"
    say(f"listening on {url}, loading {options.model}")

    import uvicorn

    from looped.server.app import create_app
    from looped.server.build import load_engine
    from looped.server.engine_thread import EngineThread, Loaded
    from looped.server.lifetime import CLOSE_SECONDS, Server, exit_code
    from looped.server.service import Service

    def load() -> Loaded:
        # The schedule is made here: it brings torch along.
        schedule = prefill_schedule(options.prefill_threshold, options.prefill_cosine, options.prefill_protected)
        chosen = replace(engine, prefill_threshold=schedule)
        return load_engine(options.model, chosen, options.device, options.dtype, options.max_loops)

    thread = EngineThread(load)
    service = Service(thread, options.served_model_name, options.model)
    keys = options.api_key or tuple(filter(None, os.environ.get("LOOPED_API_KEY", "").split(",")))
    app = create_app(service, keys, int(options.max_body_mib * (1 << 20)))
    config = uvicorn.Config(
        app,
        log_level=options.uvicorn_log_level,
        access_log=options.uvicorn_log_level in ("info", "debug"),
        timeout_graceful_shutdown=CLOSE_SECONDS,
        lifespan="on",
    )
    server = Server(config, thread, options.drain_seconds)

    def ready(info: EngineInfo) -> None:
        say(f"serving {describe(info, options.served_model_name)}, url {url}")
        say(f"engine: {info.engine}")

    thread.on_ready = ready
    with sock:
        server.run(sockets=[sock])
    return exit_code(thread)


def check(options: Options) -> None:
    """Refuse what would start a server that cannot answer, or one that is open where a key was meant to close it."""
    if not 1e-3 <= options.max_body_mib < float("inf"):
        raise LoopedError(f"--max-body-mib must be a finite number of at least 0.001, got {options.max_body_mib:g}")
    if options.drain_seconds < 0:
        raise LoopedError(f"--drain-seconds must be at least 0, got {options.drain_seconds:g}")
    check_prefill(options.prefill, options.prefill_threshold, options.prefill_cosine, options.prefill_protected)
    if options.api_key == ():
        raise LoopedError("--api-key is empty; give a key, or leave it out to serve everybody")


def engine_options(options: Options) -> EngineOptions:
    """The part of the options that the engine is built with. Raises `LoopedError` for what it refuses by name."""
    from looped.infer.options import EngineOptions

    names = {field.name for field in fields(EngineOptions)} & set(Options.__dataclass_fields__)
    chosen = EngineOptions(**{name: getattr(options, name) for name in names})
    chosen.check()
    return chosen


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything is loaded: a port in use is known at once."""
    if not 0 <= port < 1 << 16:
        raise LoopedError(f"cannot listen on port {port}; choose another --port, 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # clients that come before the event loop runs wait instead of being refused
    except OSError as error:
        raise LoopedError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from error
    return sock


def describe(info: EngineInfo, names: tuple[str, ...]) -> str:
    """What is said once at start."""
    gate = "no gate (full depth)" if info.gate is None else f"gate {info.gate}, threshold {info.threshold:g}"
    room = f"context {info.context}" + (f" (KV pool: {info.max_len})" if info.max_len < info.context else "")
    known_as = f" as {', '.join(names)}" if names else ""
    return (
        f"model {info.model}{known_as} on {info.device} in {info.dtype}, mode {info.mode}, kv {info.kv}, {gate}, "
        f"up to {info.max_depth} loops, {room}"
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
