"""The ASGI application over a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from looped import __version__
from looped.server import errors
from looped.server.middleware import BodyLimit, Keys, RequestId, Stopping
from looped.server.routes import router
from looped.server.service import Service

MAX_BODY_BYTES = 32 << 20


def create_app(service: Service, api_keys: Sequence[str] = (), max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application; its engine thread starts and ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread.start(asyncio.get_running_loop())
        yield
        service.thread.stop()

    app = FastAPI(title="looped", version=__version__, lifespan=lifespan)
    app.state.service = service
    app.include_router(router)
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(Keys, keys=tuple(api_keys))
    app.add_middleware(Stopping)
    app.add_middleware(RequestId)  # added last, runs first: a refusal has an id as well
    return app
