"""The OpenAI-compatible HTTP API: routes, streams, and errors in OpenAI's shape.

Order of gates, cheapest first: header size, room (asked, not taken), body size, request limit,
validation, size of the prompt, tokenization, workers.
Headers go out with the first token, so whatever fails before it has a proper status; later failures
are an error event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from core.config import RouterConfig
from core.errors import (
    InternalError,
    ModelNotFoundError,
    TwostrokeError,
    WorkerUnavailableError,
)
from core.lifetime import Lifetime
from router.choice import LifetimeObserver, TextChunk, collect, merge, pick_best, write_choice
from router.generate import Fleet
from router.http_errors import describe, error_body, error_headers, http_error, is_internal
from router.http_exchange import (
    REQUEST_ID,
    Envelope,
    client_label,
    read_body,
    send_body,
    send_start,
    send_whole,
    status_phrase,
    unless_gone,
)
from router.metrics import CONTENT_TYPE, RouterMetrics
from router.openai_replies import (
    DONE,
    ChatWriter,
    CompletionWriter,
    ReplyHead,
    ReplyWriter,
    Usage,
    event,
)
from router.prepare import Prepared, Preparer
from router.prompt_bound import PromptBound
from router.registry import WorkerStatus
from router.request_limit import RequestLimit
from router.request_log import RequestLog, timeline
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_BODY_BYTES = 4 << 10
"""Larger bodies (a millisecond and more of work) are parsed and tokenized in a thread, so that no
stream stutters meanwhile."""
MAX_LONG_PREPARATIONS = 4
"""Of such bodies at once. The others wait, and leave threads for whoever else needs one."""
_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """What the routes work with."""

    config: RouterConfig
    tokenizer: Tokenizer
    fleet: Fleet
    limit: RequestLimit
    requests: RequestLog
    metrics: RouterMetrics
    started: int
    """Unix time, seconds."""
    bound: PromptBound = field(init=False)
    long_preparations: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        # The tokenizer is asked for its file's text here, once: no public name of it has that.
        bound = PromptBound.read(self.tokenizer.to_json())
        object.__setattr__(self, "bound", bound)
        object.__setattr__(self, "long_preparations", asyncio.Semaphore(MAX_LONG_PREPARATIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What differs between chat and completions."""

    prepare: Callable[[Preparer, bytes, str], Prepared]
    writer: Callable[[ReplyHead], ReplyWriter]


CHAT = Endpoint(prepare=Preparer.chat, writer=ChatWriter)
COMPLETION = Endpoint(prepare=Preparer.completion, writer=CompletionWriter)


def build_app(gateway: Gateway) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Envelope, on_error=gateway.metrics.failed_reply)
    _add_error_handlers(app, gateway.metrics)
    _add_openai_routes(app, gateway)
    _add_operator_routes(app, gateway)
    if gateway.config.enable_debug:
        _add_debug_routes(app, gateway.requests)
    return app


def _add_openai_routes(app: FastAPI, gateway: Gateway) -> None:
    model = {
        "id": gateway.config.served_model_name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "twostroke",
    }

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return Exchange(gateway, CHAT)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return Exchange(gateway, COMPLETION)

    @app.head("/v1/models")
    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        if model_id != model["id"]:
            raise ModelNotFoundError(f"the model {model_id[:128]!r} does not exist", param="model")
        return JSONResponse(model)


def _add_operator_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.head("/health")
    @app.get("/health")
    async def health() -> Response:
        """Ready: every role that a request needs is there."""
        registry = gateway.fleet.registry
        counts = {role.value: len(registry.snapshots(role)) for role in registry.roles}
        missing = [role for role, count in counts.items() if not count]
        body = {"status": "unavailable" if missing else "ok", "workers": counts, "missing": missing}
        return JSONResponse(body, status_code=503 if missing else 200)

    @app.get("/cluster")
    async def cluster() -> Response:
        """Workers, load and KV use, for `twostroke status`."""
        return JSONResponse(
            {
                "model": gateway.config.served_model_name,
                "requests_in_flight": gateway.limit.num_inside,
                "workers": [worker_row(s) for s in gateway.fleet.registry.statuses()],
            }
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE)


def _add_debug_routes(app: FastAPI, requests: RequestLog) -> None:
    @app.get("/debug/requests")
    async def recent() -> Response:
        return JSONResponse({"requests": [timeline(life) for life in requests.recent()[:100]]})

    @app.get("/debug/requests/{request_id}")
    async def one(request_id: str) -> Response:
        life = requests.find(request_id)
        if life is None:
            raise HTTPException(404, "this request is not known (any more)")
        return JSONResponse(timeline(life))


def _add_error_handlers(app: FastAPI, metrics: RouterMetrics) -> None:
    def respond(status: int, body: bytes, *, retry: bool, code: str) -> Response:
        metrics.failed_reply(code)
        return Response(body, status, headers=error_headers(retry=retry))

    @app.exception_handler(TwostrokeError)
    async def ours(request: Request, error: TwostrokeError) -> Response:
        request_id = request.scope[REQUEST_ID]
        if is_internal(error):
            logger.error("request %s: %s", request_id, error)
        entry = http_error(error)
        body = describe(error, request_id)
        return respond(entry.status, body, retry=entry.retry, code=error.code)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        """No such route, method or debug entry."""
        text = f"{request.method} {request.url.path[:256]}: {error.detail}"
        code = status_phrase(error.status_code).lower().replace(" ", "_")
        body = error_body(text, "invalid_request_error", code=code)
        response = respond(error.status_code, body, retry=False, code=code)
        response.headers.update(error.headers or {})
        return response


class Exchange(Response):
    """One generation request from body to last byte. Everything it holds, it holds in `with`."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        super().__init__()
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        request_id: str = scope[REQUEST_ID]
        limit = self._gateway.limit
        with limit.reading():
            body = await read_body(scope, receive, self._gateway.config.max_body_bytes)
        with limit.enter() as ticket:
            prepared = await self._prepare(body, request_id)
            ticket.add(len(prepared.choices) - 1)
            answer = Answer(self._gateway, prepared, arrived, label=client_label(scope))
            writer = self._endpoint.writer(
                ReplyHead(
                    request_id=request_id,
                    created=int(time.time()),
                    model=self._gateway.config.served_model_name,
                    include_usage=prepared.include_usage,
                    return_token_ids=prepared.return_token_ids,
                    logprobs=prepared.logprobs,
                )
            )
            respond = self._stream if prepared.stream else self._whole
            await unless_gone(receive, respond(answer, writer, request_id, send))

    async def _prepare(self, body: bytes, request_id: str) -> Prepared:
        gateway = self._gateway
        limits = gateway.fleet.registry.limits()
        if limits is None:
            raise WorkerUnavailableError("no worker is connected")
        preparer = Preparer(
            model=gateway.config.served_model_name,
            tokenizer=gateway.tokenizer,
            limits=limits,
            bound=gateway.bound,
        )
        if len(body) < LONG_BODY_BYTES:
            return self._endpoint.prepare(preparer, body, request_id)
        async with gateway.long_preparations:
            return await asyncio.to_thread(self._endpoint.prepare, preparer, body, request_id)

    async def _whole(
        self, answer: Answer, writer: ReplyWriter, request_id: str, send: Send
    ) -> None:
        async with aclosing(answer.chunks()) as chunks:
            choices = await collect(chunks, len(answer.lives))
        prepared = answer.prepared
        if prepared.best_of > prepared.n:
            choices = pick_best(choices, best_of=prepared.best_of, n=prepared.n)
        await send_whole(send, 200, writer.whole(choices, answer.usage()), _JSON)

    async def _stream(
        self, answer: Answer, writer: ReplyWriter, request_id: str, send: Send
    ) -> None:
        async with aclosing(answer.chunks()) as chunks:
            first = await anext(chunks)  # what fails before it has a status of its own
            await send_start(send, 200, _EVENTS)
            last = await self._send_events(first, chunks, writer, request_id, send)
        if answer.prepared.include_usage and last is DONE:
            last = writer.usage_event(answer.usage()) + last
        await send_body(send, last, more=False)

    async def _send_events(
        self,
        first: TextChunk,
        chunks: AsyncIterator[TextChunk],
        writer: ReplyWriter,
        request_id: str,
        send: Send,
    ) -> bytes:
        """Returns the bytes that end the stream."""
        try:
            await send_body(send, one_line(writer.events(first)), more=True)
            async for chunk in chunks:
                if data := writer.events(chunk):
                    await send_body(send, one_line(data), more=True)
        except Exception as error:  # the status line is out: an event is all that can be said
            known = error if isinstance(error, TwostrokeError) else InternalError("a bug")
            logger.warning("request %s broke off", request_id, exc_info=error)
            self._gateway.metrics.failed_reply(known.code)
            return one_line(event(describe(known, request_id)))
        return DONE


class Answer:
    """All choices of one request, and what they cost."""

    def __init__(
        self, gateway: Gateway, prepared: Prepared, arrived: float, *, label: str | None
    ) -> None:
        self._gateway = gateway
        self.prepared = prepared
        now = time.monotonic()
        self.lives = [
            Lifetime(
                request_id=choice.request.request_id,
                arrived=arrived,
                tokenized=now,
                num_prompt_tokens=len(choice.request.prompt_token_ids),
                notes=[f"the client calls it {label}"] if label else [],
            )
            for choice in prepared.choices
        ]
        self._deadline = arrived + gateway.config.request_timeout_s
        self._observer = _Observers(gateway.requests, gateway.metrics)

    def chunks(self) -> AsyncGenerator[TextChunk, None]:
        pairs = zip(self.prepared.choices, self.lives, strict=True)
        return merge(
            [
                write_choice(
                    choice, life, self._gateway.fleet, self._observer, deadline=self._deadline
                )
                for choice, life in pairs
            ]
        )

    def usage(self) -> Usage:
        pairs = zip(self.prepared.choices, self.lives, strict=True)
        return Usage(
            num_prompt_tokens=self.prepared.num_prompt_tokens,
            num_completion_tokens=sum(life.num_output_tokens for life in self.lives),
            num_cached_tokens=sum(
                # At least one prompt token is always computed, for its logits.
                min(life.prefill.num_cached_tokens, life.num_prompt_tokens - 1)
                for choice, life in pairs
                if life.prefill and choice.request.choice_index == 0
            ),
        )


class _Observers(LifetimeObserver):
    """The log and the metrics both look on."""

    def __init__(self, *observers: LifetimeObserver) -> None:
        self._observers = observers

    def began(self, life: Lifetime) -> None:
        for observer in self._observers:
            observer.began(life)

    def tokens(self, life: Lifetime, num_tokens: int, gap_s: float | None) -> None:
        for observer in self._observers:
            observer.tokens(life, num_tokens, gap_s)

    def ended(self, life: Lifetime) -> None:
        for observer in self._observers:
            observer.ended(life)


def one_line(events: bytes) -> bytes:
    """Some clients split the stream at every line end that Unicode knows. These stand in JSON
    strings only."""
    for char, escape in _LINE_ENDS:
        events = events.replace(char, escape)
    return events


_LINE_ENDS = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029")


def worker_row(status: WorkerStatus) -> dict[str, Any]:
    """One worker of /cluster. Fields of info and report are null while it is not connected."""
    info, report = status.info, status.report
    row: dict[str, Any] = {
        "role": status.endpoint.role.value,
        "address": status.endpoint.address,
        "connected": status.usable,
        "suspect": status.suspect,
        "in_flight": status.num_in_flight,
        "name": info.worker_id.name if info else None,
        "incarnation": info.worker_id.incarnation if info else None,
        "model": info.model if info else None,
        "device": info.device if info else None,
        "num_threads": info.num_threads if info else None,
        "pid": info.pid if info else None,
        "block_size": info.layout.block_size if info else None,
        "max_num_seqs": info.max_num_seqs if info else None,
        "max_model_len": info.max_model_len if info else None,
        "kv_usage": None,
    }
    if report is not None:
        load = asdict(report)
        row |= {name: load[name] for name in _LOAD}
        row["kv_usage"] = 1 - report.num_free_blocks / max(1, report.num_blocks)
    else:
        row |= dict.fromkeys(_LOAD)
    return row


_LOAD = (
    "num_waiting",
    "num_running",
    "num_queued_tokens",
    "num_blocks",
    "num_free_blocks",
    "num_leased_blocks",
    "num_cached_blocks",
    "rss_bytes",
)
