"""One served worker: a gRPC server, its sessions, and the thread that steps the engine.

Generic over the front end, so the three kinds of workers share the shell and not the policy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import grpc

from core.errors import (
    ConfigError,
    InternalError,
    ModelNotFoundError,
    RankLostError,
    TwostrokeError,
)
from core.kv import KVHandle
from core.request import GenerateRequest, SequenceOutput
from core.worker import WorkerInfo, WorkerReport, endpoint
from protocol import worker_pb2_grpc
from protocol.session import SessionHub
from protocol.step_loop import StepLoop

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Of one gRPC message; both ends of a session set it."""
MIN_PING_INTERVAL_MS = 5_000
"""Routers ping at most this often (router/worker_client.py)."""
REPORT_INTERVAL_S = 0.05
HEARTBEAT_INTERVAL_S = 1.0


class StepResult(NamedTuple):
    outputs: list[SequenceOutput]
    worked: bool
    """False: nothing to do until a command arrives."""


class StepWorker(Protocol):
    """A front end. Every method runs on the step thread."""

    def submit(self, request: GenerateRequest, handle: KVHandle | None) -> None:
        """Raises TwostrokeError when the request is refused."""

    def abort(self, request_id: str, attempt: int) -> None:
        """Free what the request holds; unknown ids are ignored."""

    def step(self) -> StepResult: ...

    def report(self) -> WorkerReport:
        """State now, with the cache events since the report before."""

    def snapshot(self) -> WorkerReport:
        """The last report once more, with every findable block in `stored`."""


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class WorkerServer:
    """`bind`, `open` what the worker steps, add servicers to `.server`, `start(worker, info)`,
    `wait`, `stop`."""

    def __init__(self) -> None:
        limits = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),  # a taken port is an error, not a second listener
            # By default the third keepalive ping during one long step would end the session.
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ]
        self.server = grpc.aio.server(options=limits)
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._event_loop = asyncio.get_running_loop()
        self.step_loop = StepLoop(self._step, self._on_failure)
        self.hub: SessionHub | None = None
        self._closers: list[Callable[[], None]] = []
        self._opening: asyncio.Future[Any] | None = None
        self._next_report = 0.0
        self._was_busy = False

    def bind(self, host: str, port: int) -> int:
        """The port that was taken. Raises ConfigError when it cannot be had."""
        try:
            return self.server.add_insecure_port(endpoint(host, port))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error

    async def open(self, make: Callable[[], C]) -> C:
        """What `make` makes, called once and in a thread of its own; `stop` closes it when the step
        thread has ended, also where the start was cancelled before it was there."""
        opening = self._opening = asyncio.ensure_future(asyncio.to_thread(make))
        return await asyncio.shield(opening)

    def closes(self, *closers: Callable[[], None]) -> None:
        """`stop` calls them in order, off the event loop, before it closes what was opened."""
        self._closers += closers

    async def start(self, worker: StepWorker, info: WorkerInfo) -> None:
        self._worker = worker
        self._info = info
        self.hub = SessionHub(self, info)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.hub, self.server)
        self.step_loop.start()
        await self.server.start()

    @asynccontextmanager
    async def undone_on_failure(self) -> AsyncIterator[None]:
        """Around all of a start: one that fails leaves nothing behind, no port either."""
        try:
            yield
        except BaseException:
            await self.stop(0)
            raise

    async def wait(self) -> None:
        """Returns after `stop`; raises InternalError when the step thread died."""
        await asyncio.shield(self._died)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Works after a failed start too: then it gives the port back."""
        if self.hub is not None:
            self.hub.close()
        else:  # gRPC keeps the port of a server that was never started
            await self.server.start()
        await self.server.stop(grace_s)
        await asyncio.to_thread(self.step_loop.stop)
        await self._close()
        if self._died.done():
            self._died.exception()  # of a start that failed nobody asks for it
        else:
            self._died.set_result(None)

    async def _close(self) -> None:
        closers, self._closers = self._closers, []
        for close in closers:
            await asyncio.to_thread(close)
        opening, self._opening = self._opening, None
        if opening is None:
            return
        await asyncio.wait([opening])
        if opening.exception() is None:
            await asyncio.to_thread(opening.result().close)

    # FrontEnd, called by the hub: everything moves to the step thread.

    def submit(self, request: GenerateRequest, handle: KVHandle | None) -> None:
        self.step_loop.post(lambda: self._submit(request, handle))

    def abort(self, request_id: str, attempt: int) -> None:
        self.step_loop.post(lambda: self._worker.abort(request_id, attempt))

    def request_snapshot(self) -> None:
        self.step_loop.post(self._send_snapshot)

    # On the step thread.

    def _submit(self, request: GenerateRequest, handle: KVHandle | None) -> None:
        try:
            if request.model != self._info.model:
                raise ModelNotFoundError(f"this worker serves {self._info.model!r}", param="model")
            self._worker.submit(request, handle)
        except TwostrokeError as error:
            refusal = SequenceOutput(
                request_id=request.request_id, attempt=request.attempt, error=error
            )
            self._publish([refusal])

    def _publish(self, outputs: list[SequenceOutput]) -> None:
        assert self.hub is not None, "outputs before start"
        self.hub.publish(outputs)

    def _publish_report(self, report: WorkerReport, *, snapshot: bool = False) -> None:
        assert self.hub is not None, "a report before start"
        self.hub.publish_report(report, snapshot=snapshot)

    def _send_snapshot(self) -> None:
        self._publish_report(self._worker.report())
        self._publish_report(self._worker.snapshot(), snapshot=True)

    def _step(self) -> bool:
        result = self._worker.step()
        if result.outputs:
            self._publish(result.outputs)
        self._report_when_due(result.worked)
        return result.worked

    def _report_when_due(self, worked: bool) -> None:
        now = time.monotonic()
        became_idle = self._was_busy and not worked
        self._was_busy = worked
        if became_idle or now >= self._next_report:
            self._publish_report(self._worker.report())
            self._next_report = now + (REPORT_INTERVAL_S if worked else HEARTBEAT_INTERVAL_S)
        elif worked:
            self._next_report = min(self._next_report, now + REPORT_INTERVAL_S)

    def _on_failure(self, error: BaseException) -> None:
        known = isinstance(error, RankLostError)
        self.fail(str(error) if known else f"the step loop died: {error!r}")

    def fail(self, reason: str) -> None:
        """A worker that cannot step says so by ending: its streams break, its supervisor acts. From
        any thread."""
        self._event_loop.call_soon_threadsafe(self._die, reason)

    def _die(self, reason: str) -> None:
        if self.hub is not None:
            self.hub.close()
        if not self._died.done():
            self._died.set_exception(InternalError(reason))
