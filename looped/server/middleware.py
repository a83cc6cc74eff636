"""Around every request: its id, the key it must bring, the size of its body. Plain ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from looped.server.errors import ApiError, unavailable

OPEN_PATHS = ("/health", "/ping")
MAX_REQUEST_ID = 128
BODY_SECONDS = 60.0


class Stopping:
    """503 for a request that is cancelled because the server stops before its answer began: no traceback in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not begun:
                await unavailable("the server is shutting down").response()(scope, receive, send)


class RequestId:
    """Answers carry the X-Request-Id that came, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = given.isprintable() and given.isascii() and 0 < len(given) <= MAX_REQUEST_ID
        request_id = given if usable else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Keys:
    """Every path but the health checks needs one of the API keys as a bearer token; without keys all are open."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._hashes = [_hash(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._hashes or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "missing or wrong API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )
        await error.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _hash(key.strip())
        # All of them are compared, in constant time: the time says nothing about the keys.
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """413 for a body of more than `max_bytes`, announced or counted, and 408 for one whose next piece does not come:
    neither the server nor the framework caps them."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max:
            await ApiError(413, self._message).response()(scope, receive, send)
            return
        seen, complete = 0, False

        async def counted() -> Message:
            nonlocal seen, complete
            try:
                message = await asyncio.wait_for(receive(), None if complete else BODY_SECONDS)
            except TimeoutError:
                raise HTTPException(408, f"no piece of the body came for {BODY_SECONDS:g} s") from None
            complete = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise HTTPException(413, self._message)
            return message

        await self._app(scope, counted, send)

    @property
    def _message(self) -> str:
        return f"the body is larger than the {self._max} bytes that this server takes"


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
