"""The router's end of Worker.Session: one stream per worker, shared by all its requests.

Owns the connection (reconnects with backoff) and hands each output to the request it belongs to by
(request_id, attempt). Knows no policy and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import cast

import grpc

from core.errors import (
    InternalError,
    TwostrokeError,
    WorkerLostError,
    WorkerUnavailableError,
)
from core.kv import KVHandle
from core.request import GenerateRequest
from core.worker import WorkerInfo, WorkerReport
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import (
    handle_to_proto,
    info_from_proto,
    output_from_proto,
    report_from_proto,
    request_to_proto,
)
from protocol.worker_server import MAX_MESSAGE_BYTES
from router.worker_connection import OutputStream, Streams, WorkerListener

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
SUSPECT_AFTER_S = 10.0
"""Silence for this long while requests are outstanding is worth a warning."""
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Finds a worker whose host or whole process is frozen. Not below protocol.worker_server's
    # MIN_PING_INTERVAL_MS, or the worker ends the session.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # without it the ping's own minute counts
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),  # or it sends 127.0.0.1 through a proxy of the environment
    ("grpc.use_local_subchannel_pool", 1),  # a new session starts with no one else's backoff
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the limit of one attempt to connect
)


class WorkerClient:
    """A WorkerConnection over gRPC."""

    def __init__(self, address: str, listener: WorkerListener, *, router_id: str) -> None:
        self.address = address
        self.info: WorkerInfo | None = None
        self.report: WorkerReport | None = None
        self.suspect = False
        self.num_sessions = 0
        self.streams = Streams()
        self._listener = listener
        self._router_id = router_id
        self._outbox: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._last_message = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name=f"session with {self.address}")

    async def close(self) -> None:
        self._end_session(WorkerUnavailableError("the worker was taken out of service"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def submit(
        self,
        request: GenerateRequest,
        handle: KVHandle | None = None,
        *,
        timeout_s: float | None = None,
    ) -> OutputStream:
        if self.info is None:
            raise WorkerUnavailableError(f"the worker at {self.address} is not connected")
        submit = pb.Submit(
            request=request_to_proto(request),
            handle=None if handle is None else handle_to_proto(handle),
        )
        stream = self.streams.open(request.key, self.release, timeout_s)
        self._outbox.put_nowait(pb.RouterMessage(submit=submit))
        return stream

    def release(self, request_id: str, attempt: int) -> None:
        self.streams.forget(request_id, attempt)
        if self.info is not None:
            abort = pb.Abort(request_id=request_id, attempt=attempt)
            self._outbox.put_nowait(pb.RouterMessage(abort=abort))

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            num_sessions, bug = self.num_sessions, False
            try:
                await self._session()
                reason = "it closed the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except TwostrokeError as error:
                reason = f"it says what cannot be: {error}"
            except Exception:
                logger.exception("the session with %s failed", self.address)
                reason, bug = "a bug", True
            if self.num_sessions > num_sessions:  # it had worked
                logger.warning("lost the worker at %s: %s", self.address, reason)
                backoff_s = backoff_s if bug else MIN_BACKOFF_S  # a bug may come again at once
            self._end_session(WorkerLostError("the worker that ran this request was lost"))
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    async def _session(self) -> None:
        outbox = self._outbox = asyncio.Queue()
        hello = pb.Hello(router_id=self._router_id)
        outbox.put_nowait(pb.RouterMessage(hello=hello))
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            # The stub is one class at run time; only its type knows that this channel is async.
            stub = cast("worker_pb2_grpc.WorkerAsyncStub", worker_pb2_grpc.WorkerStub(channel))
            call = stub.Session()  # type: ignore[call-arg]  # its requests are written later
            helpers = (
                asyncio.create_task(_write(call, outbox)),
                asyncio.create_task(self._watch()),
            )
            try:
                # Not `async for`: an error in _take would leave the call's generator unfinished.
                while isinstance(message := await call.read(), pb.WorkerMessage):
                    self._take(message)
            finally:
                call.cancel()
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    def _take(self, message: pb.WorkerMessage) -> None:
        self._last_message = asyncio.get_running_loop().time()
        kind = message.WhichOneof("message")
        if kind == "step":
            for output in message.step.outputs:
                self._dispatch(output)
        elif kind == "report" and self.info is not None:
            self.report = report_from_proto(message.report)
            self._listener.worker_reported(self.info, self.report)
        elif kind == "info":
            self.info = info_from_proto(message.info)
            self.num_sessions += 1
            logger.info("connected to %s at %s", self.info.worker_id, self.address)

    def _dispatch(self, message: pb.SequenceOutput) -> None:
        stream = self.streams.find((message.request_id, message.attempt))
        if stream is None:
            return
        try:
            output = output_from_proto(message)
        except (TwostrokeError, ValueError):  # fails the one request, not its neighbours
            logger.exception("an output of %s cannot be read", self.address)
            stream.put(InternalError("the worker's answer cannot be read"))
            return
        self.streams.put(stream, output)

    def _end_session(self, error: TwostrokeError) -> None:
        info, self.info, self.report, self.suspect = self.info, None, None, False
        self.streams.end(error)
        if info is not None:
            self._listener.worker_lost(info)

    async def _watch(self) -> None:
        """gRPC's own pings see a dead host; they are answered even while the step loop hangs."""
        clock = asyncio.get_running_loop().time
        busy_since = clock()
        while True:
            await asyncio.sleep(SUSPECT_AFTER_S / 10)
            if not self.streams:
                busy_since = clock()
            silence_s = clock() - max(self._last_message, busy_since)
            suspect = silence_s > SUSPECT_AFTER_S
            if suspect and not self.suspect:
                logger.warning("the worker at %s is silent although it has work", self.address)
            self.suspect = suspect


async def _write(
    call: grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage],
    outbox: asyncio.Queue[pb.RouterMessage],
) -> None:
    """A broken stream ends this too; whoever reads it sees the error."""
    while True:
        await call.write(await outbox.get())
