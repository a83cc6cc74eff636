"""One error shape for everything: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from looped.errors import LoopedError

log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable",
}
# Bad input must not come back at length: a body of megabytes would give an answer of megabytes.
MAX_ERRORS, MAX_MESSAGE = 5, 300


class ApiError(Exception):
    """An answer with an error status. `param` names the request's field at fault, where there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON. A status that the OpenAI API does not name is an invalid request or a server error."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def unavailable(message: str) -> ApiError:
    """503: the server is loading, stopping or broken. Clients may try again after a second."""
    return ApiError(503, message, code="service_unavailable", headers={"Retry-After": "1"})


def internal() -> ApiError:
    """500, without any detail of what went wrong inside."""
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def engine_fault() -> ApiError:
    """500 for a request that failed inside the engine."""
    return ApiError(500, "the engine failed on this request; the server's log has the details", code="engine_error")


def install(app: FastAPI) -> None:
    """Route every kind of error through the one shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(LoopedError, _looped_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _looped_error(request: Request, error: Exception) -> JSONResponse:
    return ApiError(400, _short(str(error))).response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = _unreadable(error.__cause__) or str(error.detail)
    if error.status_code in (404, 405):
        message = f"{HTTPStatus(error.status_code).phrase}: {request.method} {request.url.path}"
    return ApiError(error.status_code, _short(message), headers=error.headers).response()


def _unreadable(cause: BaseException | None) -> str | None:
    """What the framework calls "an error parsing the body", in words."""
    if isinstance(cause, RecursionError):
        return "the body is not valid JSON: it is nested too deeply"
    if isinstance(cause, UnicodeError):
        return "the body is not valid JSON: it is not UTF-8 text"
    if isinstance(cause, ValueError):  # Python reads no whole number of more than 4,300 digits
        return "the body holds a number of thousands of digits"
    return None


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    return internal().response()  # the traceback goes to the log: Starlette raises the exception again


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """400 from pydantic's list of errors: the first names the field, a few are spelled out."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if tuple(first["loc"]) == ("body",):
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    lines = [f"{_place(error['loc'])}: {_short(_plain(error['msg']))}" for error in errors[:MAX_ERRORS]]
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more")
    return ApiError(400, "; ".join(lines), param=_place(first["loc"]))


def _place(loc: Sequence[Any]) -> str:
    return ".".join(str(part) for part in loc[1:])


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ")


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"
