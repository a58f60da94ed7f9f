"""One HTTP exchange below the framework: bounded bodies, clients that go away or stop reading.

Knows ASGI and our errors; knows nothing of tokens or workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from core.errors import AbortedError, DeadlineExceededError, InternalError
from router.http_errors import (
    BodyTooLargeError,
    error_body,
    error_headers,
    internal_message,
)

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 30.0
"""A client that takes nothing for this long is gone. What waits for it meanwhile is bounded by the
tokens of that time."""
REQUEST_ID = "twostroke.request_id"
"""Key in the ASGI scope: our id of the request."""
_LABEL = re.compile(rb"[A-Za-z0-9._:/-]{1,64}")
ABORT = "twostroke.abort"
"""ASGI extension: `call` drops the connection with all that waits in it."""


class SlowClientError(AbortedError):
    """Its connection must be dropped: nothing more can be said over it."""


class AbortableProtocol(HttpToolsProtocol):
    """Lets the application drop a connection. Closing it would wait for a reader that is gone."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}


async def drop_connection(scope: Scope) -> None:
    scope["extensions"][ABORT]["call"]()
    await asyncio.sleep(0)  # until the server has seen it, or it complains of an unfinished reply


class Envelope:
    """Outermost: an id of ours on every response, and no exception leaves but as our 500.
    `on_error` is called with its code."""

    def __init__(self, app: ASGIApp, on_error: Callable[[str], None]) -> None:
        self._app = app
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[REQUEST_ID] = uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed inside the router", request_id)
            self._on_error(InternalError.code)
            if not started:
                message = internal_message(request_id)
                body = error_body(message, "server_error", code=InternalError.code)
                await send_whole(send_with_id, 500, body, error_headers(retry=False))


def client_label(scope: Scope) -> str | None:
    """The client's own X-Request-Id, for people who compare logs; decides nothing. None unless it
    is short and plain."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _LABEL.fullmatch(given) else None


async def send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Raises SlowClientError when the client has not taken earlier bytes for SEND_TIMEOUT_S."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})
    except TimeoutError:
        raise SlowClientError("the client does not read its answer") from None


async def send_whole(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    await send_start(send, status, {**headers, "content-length": str(len(body))})
    await send_body(send, body, more=False)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, never holding more than `max_bytes` and one piece. Raises
    BodyTooLargeError, AbortedError, DeadlineExceededError."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise AbortedError("the client went away")
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise DeadlineExceededError("the request's body did not arrive in time") from None


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than the limit of {max_bytes} bytes")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it, and wait for its clean-up, when the client goes away. Call it after
    the body was read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.wait((task, watcher))
    with contextlib.suppress(asyncio.CancelledError):
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def status_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "error"
