"""The worker's end of a session: requests in, outputs out. Knows no engine.

A front end plugs in through three thread-safe calls and publishes what each step produced; the hub
hands every router its own sequences, all of a step at once: over gRPC (Worker.Session) as one
message, or, to a router in this process, as they are (`SessionHub.join`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
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


class Reader(Protocol):
    """Who hears what a worker says. Called on the hub's event loop; must not block or raise."""

    def take_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        """Those of one step that are its own."""

    def take_report(self, report: WorkerReport) -> None: ...

    def end(self) -> None:
        """The worker says no more. Idempotent."""


class RouterSession:
    """One connected router: who reads, and what it asked for."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.keys: set[RequestKey] = set()
        self.fresh = True
        """No snapshot sent yet; increments would mean nothing to it."""


class _Outbox:
    """A Reader at the other end of a gRPC stream: the messages it has not been sent yet."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()

    def take_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        step = pb.StepOutputs(outputs=map(_to_proto, outputs))
        self._send(pb.WorkerMessage(step=step))

    def take_report(self, report: WorkerReport) -> None:
        self._send(pb.WorkerMessage(report=report_to_proto(report)))

    def _send(self, message: pb.WorkerMessage) -> None:
        if self.messages.qsize() >= MAX_QUEUED_MESSAGES:
            logger.error("a router does not read its stream; closing it")
            self.end()
        else:
            self.messages.put_nowait(message)

    def end(self) -> None:
        while not self.messages.empty():
            self.messages.get_nowait()
        self.messages.put_nowait(None)


class SessionHub(worker_pb2_grpc.WorkerServicer):
    """Serves all routers of one worker, on one event loop; `publish*` may be called anywhere."""

    def __init__(self, front_end: FrontEnd, info: WorkerInfo) -> None:
        self.info = info
        self._front_end = front_end
        self._loop = asyncio.get_running_loop()
        self._sessions: set[RouterSession] = set()
        self._owner: dict[RequestKey, RouterSession] = {}

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.RouterMessage],
        context: grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage],
    ) -> AsyncIterator[pb.WorkerMessage]:
        outbox = _Outbox()
        session = self.join(outbox)
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield pb.WorkerMessage(info=info_to_proto(self.info))
            while (message := await outbox.messages.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self.leave(session)
            await asyncio.wait([reader])

    async def _read(
        self, session: RouterSession, request_iterator: AsyncIterator[pb.RouterMessage]
    ) -> None:
        try:
            async for message in request_iterator:
                self._accept(session, message)
        finally:
            session.reader.end()  # the router half-closed or its connection broke

    def _accept(self, session: RouterSession, message: pb.RouterMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._accept_submit(session, message.submit)
        elif kind == "abort":
            self.abort(session, (message.abort.request_id, message.abort.attempt))
        elif kind == "hello":
            logger.info("router %s is connected", message.hello.router_id)

    def _accept_submit(self, session: RouterSession, submit: pb.Submit) -> None:
        try:
            handle = handle_from_proto(submit.handle) if submit.HasField("handle") else None
            request = request_from_proto(submit.request)
        except TwostrokeError as error:
            key = (submit.request.request_id, submit.request.attempt)
            session.reader.take_outputs([_failure(key, error)])
            return
        self.submit(session, request, handle)

    # What a router does, wherever it is. On the event loop.

    def join(self, reader: Reader) -> RouterSession:
        """`reader` is sent the worker's reports from now on, a snapshot first."""
        session = RouterSession(reader)
        self._sessions.add(session)
        self._front_end.request_snapshot()
        return session

    def leave(self, session: RouterSession) -> None:
        """Nobody reads what its sequences would say: they are aborted."""
        self._sessions.discard(session)
        for key in session.keys:
            self._owner.pop(key, None)
            self._front_end.abort(*key)
        session.keys.clear()

    def submit(
        self, session: RouterSession, request: GenerateRequest, handle: KVHandle | None
    ) -> None:
        """Its outputs go to the session's reader; a refusal is one of them."""
        key = request.key
        if key in self._owner:  # its owner keeps it
            error = InvalidRequestError("this attempt is already here", param="request_id")
            session.reader.take_outputs([_failure(key, error)])
            return
        session.keys.add(key)
        self._owner[key] = session
        self._front_end.submit(request, handle)

    def abort(self, session: RouterSession, key: RequestKey) -> None:
        """An aborted sequence says nothing more. One that nobody owns may have been handed over:
        then its lease ends."""
        owner = self._owner.get(key)
        if owner is session:
            self._disown(session, key)
        if owner is None or owner is session:
            self._front_end.abort(*key)

    def _disown(self, session: RouterSession, key: RequestKey) -> None:
        session.keys.discard(key)
        del self._owner[key]

    # What the worker says. Safe from any thread.

    def publish(self, outputs: Sequence[SequenceOutput]) -> None:
        """Send a step's outputs to the routers that asked for them. Takes the list over."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        by_session: defaultdict[RouterSession, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            session = self._owner.get(output.key)
            if session is None:  # aborted while the step ran
                continue
            by_session[session].append(output)
            if output.is_last:
                self._disown(session, output.key)
        for session, own in by_session.items():
            session.reader.take_outputs(own)

    def publish_report(self, report: WorkerReport, *, snapshot: bool) -> None:
        """Tell every router how this worker is doing; fresh ones wait for a snapshot."""
        self._loop.call_soon_threadsafe(self._deliver_report, report, snapshot)

    def _deliver_report(self, report: WorkerReport, snapshot: bool) -> None:
        for session in self._sessions:
            if snapshot == session.fresh:
                session.fresh = False
                session.reader.take_report(report)

    def close(self) -> None:
        """End all sessions; their requests are aborted as each one leaves."""
        for session in tuple(self._sessions):
            session.reader.end()


def _failure(key: RequestKey, error: TwostrokeError) -> SequenceOutput:
    return SequenceOutput(request_id=key[0], attempt=key[1], error=error)


def _to_proto(output: SequenceOutput) -> pb.SequenceOutput:
    """What does not fit the wire is that request's failure, never its neighbours' silence."""
    try:
        return output_to_proto(output)
    except (TypeError, ValueError):
        logger.exception("an output of %s cannot be sent", output.key)
        return output_to_proto(_failure(output.key, InternalError("the answer cannot be sent")))
