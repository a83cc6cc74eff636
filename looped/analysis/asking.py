"""The demo's fourth step: a server in this process, and word problems asked over HTTP."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from looped.analysis.results import NATIVE, Answered, Piece
from looped.analysis.steps import MAX_NEW_TOKENS, threshold_of
from looped.data.evalsets import eval_problems
from looped.errors import LoopedError
from looped.infer.detokenize import Detokenizer
from looped.model import LoopedLM
from looped.progress import progress

# A document ends in a blank line; what a model writes behind it is the next one.
STOPS = ("\n\n", "Q:")


def ask(model: LoopedLM, name: str, count: int) -> tuple[Answered, ...]:
    """Serve the model on a free port, ask `count` word problems and as many drills over HTTP, and stop the server."""
    threshold = threshold_of(model)
    kinds = ("trained", "drills")
    problems = [problem for kind in kinds for problem in itertools.islice(eval_problems(kind, "demo"), count)]
    with _served(model, name, threshold) as url, progress(len(problems), f"chat requests to {url}") as bar:
        answers = []
        for problem in problems:
            answers.append(_ask(model, url, problem.question, str(problem.answer), f"native gate at {threshold:g}"))
            bar.advance()
    return tuple(answers)


@contextmanager
def _served(model: LoopedLM, name: str, threshold: float) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    import uvicorn

    from looped.infer.options import EngineOptions
    from looped.server.app import create_app
    from looped.server.build import load_engine
    from looped.server.engine_thread import EngineThread
    from looped.server.lifetime import Server
    from looped.server.serve import bind
    from looped.server.service import Service

    options = EngineOptions(gate=NATIVE, threshold=threshold, max_num_seqs=8)
    dtype = str(model.dtype).removeprefix("torch.")
    thread = EngineThread(lambda: load_engine(name, options, str(model.device), dtype))
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(Service(thread)), log_level="error", timeout_graceful_shutdown=1, lifespan="on")
    server = Server(config, thread, drain_seconds=1.0)
    serving = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    serving.start()
    try:
        deadline = time.monotonic() + 60
        while not thread.loaded:
            if not serving.is_alive() or time.monotonic() > deadline:
                raise LoopedError(f"the server did not start ({thread.error or 'no answer within 60 s'})")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        serving.join(10)
        sock.close()


def _ask(model: LoopedLM, url: str, question: str, expected: str, settings: str) -> Answered:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_NEW_TOKENS,
        "temperature": 0,
        "stop": list(STOPS),
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as response:
        choice = json.load(response)["choices"][0]
    seconds = time.perf_counter() - start
    pieces = _pieces(model, choice["token_ids"], choice["exit_depths"], choice["message"]["content"])
    return Answered(question, pieces, choice["finish_reason"], expected, seconds, settings)


def _pieces(model: LoopedLM, token_ids: Sequence[int], depths: Sequence[int], text: str) -> tuple[Piece, ...]:
    """The text of each token. Characters of several tokens stand with the last of them; a stop string is cut."""
    assert model.tokenizer is not None
    reader = Detokenizer(model.tokenizer)
    shown = [reader.push(token) for token in token_ids]
    shown[-1] += reader.finish()
    pieces, room = [], len(text)
    for piece, depth in zip(shown, depths, strict=True):
        pieces.append(Piece(piece[:room], depth))
        room -= len(pieces[-1].text)
    return tuple(pieces)
