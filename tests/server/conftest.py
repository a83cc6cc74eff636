"""A random micro checkpoint with a byte tokenizer and a chat template, and servers on 127.0.0.1 in threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
import uvicorn
from openai import OpenAI

from looped.infer.options import EngineOptions
from looped.model import save
from looped.server.app import MAX_BODY_BYTES, create_app
from looped.server.build import load_engine
from looped.server.engine_thread import EngineThread, Loaded
from looped.server.lifetime import Server
from looped.server.serve import bind
from looped.server.service import Service
from tests.models import micro_ouro

CONTEXT = 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """One token a byte, and three special ones."""
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab |= {byte: len(vocab) + i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "bos_token": {"content": SPECIAL[0]}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(folder: Path) -> Path:
    """A micro Ouro over bytes whose native gate uses every depth at the config's threshold."""
    folder.mkdir(parents=True)
    save(micro_ouro(vocab_size=259, max_positions=CONTEXT, exit_threshold=0.6), folder, dtype="float32")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "micro")


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    server: Server
    thread: EngineThread
    serving: threading.Thread

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait for `condition`; fails the test if it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def on_loop(self, call: Callable[[], object]) -> None:
        assert self.thread._loop is not None
        self.thread._loop.call_soon_threadsafe(call)


@contextmanager
def running(
    load: Callable[[], Loaded],
    *,
    keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    names: tuple[str, ...] = (),
    drain_seconds: float = 10.0,
    stall_seconds: float = 60.0,
    wait: bool = True,
) -> Iterator[Running]:
    """A server over what `load` gives; with `wait`, not before it is ready."""
    thread = EngineThread(load, stall_seconds)
    app = create_app(Service(thread, names), keys, max_body_bytes)
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on")
    server = Server(config, thread, drain_seconds)
    serving = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    run = Running(f"http://127.0.0.1:{sock.getsockname()[1]}", server, thread, serving)
    serving.start()
    try:
        if wait:
            run.until(lambda: thread.loaded, seconds=60)
        yield run
    finally:
        server.should_exit = True
        serving.join(10)
        assert not serving.is_alive()


@pytest.fixture(scope="session")
def live(checkpoint: Path) -> Iterator[Running]:
    """The micro checkpoint served in float64."""
    options = EngineOptions(gate="native", max_num_seqs=8)
    with running(lambda: load_engine(str(checkpoint), options, "cpu", "float64")) as run:
        yield run


@pytest.fixture(scope="session")
def client(live: Running) -> OpenAI:
    return live.client()
