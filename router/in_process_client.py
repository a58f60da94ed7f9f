"""A worker in this very process: the twin of `worker_client` without gRPC and protobuf.

A request is handed to the worker's hub as it is, and all outputs of an engine step come in one call
on the event loop. Knows no policy and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import TwostrokeError, WorkerLostError, WorkerUnavailableError
from core.kv import KVHandle
from core.request import GenerateRequest, SequenceOutput
from core.worker import WorkerInfo, WorkerReport
from protocol.session import RouterSession, SessionHub
from router.worker_connection import OutputStream, Streams, WorkerListener


class InProcessClient:
    """A WorkerConnection, and the Reader of its session. `hub` lives on this event loop.

    Once lost it stays so: a worker that is started again has another hub.
    """

    def __init__(self, hub: SessionHub, listener: WorkerListener) -> None:
        self.info: WorkerInfo | None = None
        self.report: WorkerReport | None = None
        self.suspect = False  # a hang in here is everybody's: no other worker would be better
        self.num_sessions = 0
        self.streams = Streams()
        self._hub = hub
        self._listener = listener
        self._session: RouterSession | None = None

    def start(self) -> None:
        self.info = self._hub.info
        self.num_sessions += 1
        self._session = self._hub.join(self)

    async def close(self) -> None:
        self._end(WorkerUnavailableError("the worker was taken out of service"))

    def submit(
        self,
        request: GenerateRequest,
        handle: KVHandle | None = None,
        *,
        timeout_s: float | None = None,
    ) -> OutputStream:
        if self._session is None:
            raise WorkerUnavailableError("the worker has ended")
        stream = self.streams.open(request.key, self.release, timeout_s)
        self._hub.submit(self._session, request, handle)
        return stream

    def release(self, request_id: str, attempt: int) -> None:
        self.streams.forget(request_id, attempt)
        if self._session is not None:
            self._hub.abort(self._session, (request_id, attempt))

    # Reader

    def take_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            stream = self.streams.find(output.key)
            if stream is not None:
                self.streams.put(stream, output)

    def take_report(self, report: WorkerReport) -> None:
        if self.info is not None:
            self.report = report
            self._listener.worker_reported(self.info, report)

    def end(self) -> None:
        self._end(WorkerLostError("the worker that ran this request was lost"))

    def _end(self, error: TwostrokeError) -> None:
        session, self._session = self._session, None
        info, self.info, self.report = self.info, None, None
        if session is not None:
            self._hub.leave(session)
        self.streams.end(error)
        if info is not None:
            self._listener.worker_lost(info)
