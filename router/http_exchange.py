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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from core.errors import (
    AbortedError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
)
from router.http_errors import (
    BodyTooLargeError,
    HeadersTooLargeError,
    describe,
    error_body,
    error_headers,
    http_error,
    internal_message,
)

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 30.0
"""A client that takes too little for this long is gone. What waits for it meanwhile is bounded by
the tokens of that time."""
REQUEST_ID = "twostroke.request_id"
"""Key in the ASGI scope: our id of the request."""
_LABEL = re.compile(rb"[A-Za-z0-9._:/-]{1,64}")
MAX_HEADER_BYTES = 64 << 10
_HEADER_PUNCTUATION = 4
"""Bytes of a header line besides name and value."""


class AbortableProtocol(HttpToolsProtocol):
    """Drops the connection of a client that does not read (closing it would wait for it), and
    bounds what a client may send outside of bodies, which the server would keep."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._num_header_bytes = 0
        """Of headers (and trailers) that the parser has handed over."""
        self._num_unparsed = 0
        """Received since the parser last got to the end of headers or to bytes of a body: it keeps
        the header it is in the middle of."""
        self._advanced = False
        self._cycles: list[RequestResponseCycle] = []
        """Requests not answered yet; only the last one hears of the connection's end elsewhere."""
        self._patience: asyncio.TimerHandle | None = None
        """Runs while the client does not take what is sent: a deadline that costs writes nothing,
        whereas one timeout each would be the dearest part of a streamed token."""
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_patience()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._patience = self.loop.call_later(SEND_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_patience()

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def data_received(self, data: bytes) -> None:
        self._advanced = False
        super().data_received(data)
        self._num_unparsed = 0 if self._advanced else self._num_unparsed + len(data)
        if self._num_unparsed > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        self._advanced = True
        self._num_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._advanced = True
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def _count(self, *pieces: bytes) -> None:
        """An exception here reaches `send_400_response` by way of the parser."""
        self._num_header_bytes += sum(map(len, pieces)) + _HEADER_PUNCTUATION
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise _headers_too_large()

    def send_400_response(self, msg: str) -> None:
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
        else:
            self._refuse(InvalidRequestError(msg))

    def _refuse(self, error: InvalidRequestError) -> None:
        """Answer below the application, and close. Silent within another request's answer."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_last_reply(error))
        self.transport.close()


def _headers_too_large() -> HeadersTooLargeError:
    return HeadersTooLargeError(
        f"the headers are larger than the limit of {MAX_HEADER_BYTES} bytes"
    )


def _last_reply(error: InvalidRequestError) -> bytes:
    request_id, status = uuid4().hex, http_error(error).status
    body = describe(error, request_id)
    headers = {
        **error_headers(retry=False),
        "x-request-id": request_id,
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {status} {status_phrase(status)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


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
    """Waits for a client that is slow to take earlier bytes."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


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
