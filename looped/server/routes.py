"""The endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

from looped import __version__
from looped.server.admission import check_model, tokenize
from looped.server.errors import ApiError
from looped.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from looped.server.service import Service
from looped.server.sse import HEADERS, Answer, stream, whole

router = APIRouter()
CLIENT_CLOSED = 499


def get_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(get_service)]


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, service: Served) -> Response:
    """Continue one or several prompts."""
    return await _respond(request, service.complete(body), bool(body.stream))


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, service: Served) -> Response:
    """Answer a chat."""
    return await _respond(request, service.chat(body), bool(body.stream))


async def _respond(request: Request, admission: Coroutine[Any, Any, Answer], streaming: bool) -> Response:
    """The answer to a request, as events or as one body. Nothing is sent before the engine has taken the request."""
    if streaming:
        answer = await admission
        # A client that leaves before the first event is sent: the stream never starts, so it cannot abort anything.
        leave = BackgroundTask(answer.close)
        return StreamingResponse(stream(answer), headers=HEADERS, media_type="text/event-stream", background=leave)
    body = await _while_connected(request, _finished(admission))
    return Response(status_code=CLIENT_CLOSED) if body is None else JSONResponse(body)


async def _finished(admission: Coroutine[Any, Any, Answer]) -> dict[str, Any]:
    return await whole(await admission)


async def _while_connected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """The result of `work`, or None once the client has gone: nobody else notices that without a stream."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # until it has told the engine


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    """The served model under its names."""
    names = service.names or service.served[:1]
    return {"object": "list", "data": [_model(service, name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> dict[str, Any]:
    """One model."""
    return _model(service, check_model(name, service.served))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "looped",
        "root": service.info.model,
        "max_model_len": service.info.max_len,
        "max_loops": service.info.max_depth,
    }


@router.get("/health")
@router.get("/ping")
async def health(service: Served) -> dict[str, str]:
    """200 when requests can be served and the engine makes progress, else 503."""
    service.thread.check()
    return {"status": "ok"}


@router.get("/version")
async def version(service: Served) -> dict[str, Any]:
    """The version and what the engine was started with."""
    info = service.info
    return {
        "version": __version__,
        "model": info.model,
        "mode": info.mode,
        "kv": info.kv,
        "gate": info.gate,
        "threshold": info.threshold,
        "max_loops": info.max_depth,
        "max_model_len": info.max_len,
        "dtype": info.dtype,
        "device": info.device,
    }


@router.post("/tokenize")
async def tokenize_text(body: TokenizeRequest, service: Served) -> Response:
    """Token ids of a text, or of a chat."""
    check_model(body.model, service.served)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = [message.model_dump() for message in body.messages]
        add_prompt = body.add_generation_prompt is not False
        text = await asyncio.to_thread(service.info.template.render, messages, add_prompt)
        ids = await tokenize(text, service.info, body.add_special_tokens is True)
    else:
        ids = await tokenize(body.prompt or "", service.info, body.add_special_tokens is not False)
    # A response of our own: the framework would look at each of what may be millions of ids.
    return JSONResponse({"count": len(ids), "max_model_len": service.info.max_len, "tokens": ids})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: Served) -> dict[str, str]:
    """The text of token ids."""
    check_model(body.model, service.served)
    info = service.info
    if info.tokenizer is None:
        raise ApiError(400, f"{info.model} has no tokenizer", code="no_tokenizer")
    if body.tokens and max(body.tokens) >= info.vocab_size:
        raise ApiError(400, f"token ids must be between 0 and {info.vocab_size - 1}", param="tokens")
    return {"prompt": await asyncio.to_thread(info.tokenizer.decode, body.tokens, False)}


@router.get("/tokenizer_info")
async def tokenizer_info(service: Served) -> dict[str, Any]:
    """Special tokens and chat template, for clients that tokenise through the server."""
    info = service.info
    if info.tokenizer is None:
        raise ApiError(404, f"{info.model} has no tokenizer", code="no_tokenizer")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": info.vocab_size,
        "model_max_length": info.context,
        "eos_token": None,
        "bos_token": None,
        **info.template.tokens,
        "chat_template": info.template.text,
    }
