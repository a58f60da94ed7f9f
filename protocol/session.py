"""The worker's end of Worker.Session: streams in, outputs out. Knows no engine.

A front end (prefill or decode worker) plugs in through three thread-safe calls and publishes what
each step produced; the hub sends every router its own sequences, one message per step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

import grpc

from core.errors import InternalError, InvalidRequestError, TwostrokeError
from core.kv import KVHandle
from core.request import GenerateRequest, RequestKey, SequenceOutput
from core.worker import WorkerInfo, WorkerReport
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import (
    handle_from_proto,
    info_to_proto,
    output_to_proto,
    report_to_proto,
    request_from_proto,
)

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 10_000
"""A router that reads slower than this many steps is cut off; its requests are aborted."""


class FrontEnd(Protocol):
    """What a session needs of a worker. All three return at once and are safe from any thread."""

    def submit(self, request: GenerateRequest, handle: KVHandle | None) -> None: ...

    def abort(self, request_id: str, attempt: int) -> None: ...

    def request_snapshot(self) -> None:
        """Publish a report soon whose `stored` names every findable block."""


class _Session:
    """One connected router: what it asked for, and the messages it has not been sent yet."""

    def __init__(self) -> None:
        self.keys: set[RequestKey] = set()
        self.outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self.fresh = True
        """No snapshot sent yet; increments would mean nothing to it."""

    def send(self, message: pb.WorkerMessage) -> None:
        if self.outbox.qsize() >= MAX_QUEUED_MESSAGES:
            logger.error("a router does not read its stream; closing it")
            self.close()
        else:
            self.outbox.put_nowait(message)

    def close(self) -> None:
        while not self.outbox.empty():
            self.outbox.get_nowait()
        self.outbox.put_nowait(None)


class SessionHub(worker_pb2_grpc.WorkerServicer):
    """Serves all routers of one worker, on one event loop; `publish*` may be called anywhere."""

    def __init__(self, front_end: FrontEnd, info: WorkerInfo) -> None:
        self._front_end = front_end
        self._info = info
        self._loop = asyncio.get_running_loop()
        self._sessions: set[_Session] = set()
        self._owner: dict[RequestKey, _Session] = {}

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.RouterMessage],
        context: grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage],
    ) -> AsyncIterator[pb.WorkerMessage]:
        session = _Session()
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield pb.WorkerMessage(info=info_to_proto(self._info))
            self._front_end.request_snapshot()
            while (message := await session.outbox.get()) is not None:
                yield message
        finally:
            self._sessions.discard(session)
            reader.cancel()
            self._abandon(session)
            await asyncio.wait([reader])

    async def _read(
        self, session: _Session, request_iterator: AsyncIterator[pb.RouterMessage]
    ) -> None:
        try:
            async for message in request_iterator:
                self._accept(session, message)
        finally:
            session.close()  # the router half-closed or its connection broke

    def _accept(self, session: _Session, message: pb.RouterMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(session, message.submit)
        elif kind == "abort":
            self._abort(session, (message.abort.request_id, message.abort.attempt))
        elif kind == "hello":
            logger.info("router %s is connected", message.hello.router_id)

    def _abort(self, session: _Session, key: RequestKey) -> None:
        """An aborted sequence says nothing more. One that nobody owns may have been handed over:
        then its lease ends."""
        owner = self._owner.get(key)
        if owner is session:
            self._disown(session, key)
        if owner is None or owner is session:
            self._front_end.abort(*key)

    def _disown(self, session: _Session, key: RequestKey) -> None:
        session.keys.discard(key)
        del self._owner[key]

    def _submit(self, session: _Session, submit: pb.Submit) -> None:
        key = (submit.request.request_id, submit.request.attempt)
        if key in self._owner:  # its owner keeps it
            error = InvalidRequestError("this attempt is already here", param="request_id")
            _send(session, [SequenceOutput(request_id=key[0], attempt=key[1], error=error)])
            return
        session.keys.add(key)
        self._owner[key] = session
        try:
            handle = handle_from_proto(submit.handle) if submit.HasField("handle") else None
            self._front_end.submit(request_from_proto(submit.request), handle)
        except TwostrokeError as error:
            refusal = SequenceOutput(request_id=key[0], attempt=key[1], error=error)
            self._deliver((refusal,))

    def _abandon(self, session: _Session) -> None:
        """Nobody reads what these sequences would say."""
        for key in session.keys:
            self._owner.pop(key, None)
            self._front_end.abort(*key)

    def publish(self, outputs: Iterable[SequenceOutput]) -> None:
        """Send a step's outputs to the routers that asked for them."""
        self._loop.call_soon_threadsafe(self._deliver, tuple(outputs))

    def _deliver(self, outputs: tuple[SequenceOutput, ...]) -> None:
        by_session: defaultdict[_Session, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            session = self._owner.get(output.key)
            if session is None:  # aborted while the step ran
                continue
            by_session[session].append(output)
            if output.is_last:
                self._disown(session, output.key)
        for session, own in by_session.items():
            _send(session, own)

    def publish_report(self, report: WorkerReport, *, snapshot: bool) -> None:
        """Tell every router how this worker is doing; fresh ones wait for a snapshot."""
        self._loop.call_soon_threadsafe(self._deliver_report, report, snapshot)

    def _deliver_report(self, report: WorkerReport, snapshot: bool) -> None:
        message = pb.WorkerMessage(report=report_to_proto(report))
        for session in self._sessions:
            if snapshot == session.fresh:
                session.fresh = False
                session.send(message)

    def close(self) -> None:
        """End all streams; their requests are aborted as each stream ends."""
        for session in tuple(self._sessions):
            session.close()


def _send(session: _Session, outputs: list[SequenceOutput]) -> None:
    session.send(pb.WorkerMessage(step=pb.StepOutputs(outputs=map(_to_proto, outputs))))


def _to_proto(output: SequenceOutput) -> pb.SequenceOutput:
    """What does not fit the wire is that request's failure, never its neighbours' silence."""
    try:
        return output_to_proto(output)
    except (TypeError, ValueError):
        logger.exception("an output of %s cannot be sent", output.key)
        error = InternalError("the answer cannot be sent")
        return output_to_proto(
            SequenceOutput(request_id=output.request_id, attempt=output.attempt, error=error)
        )
