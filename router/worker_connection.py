"""What the router needs of a worker, however it is reached, and the outputs of one request there.

Promises that every OutputStream ends: with the worker's last output or with an error; when the
connection breaks, all of them at once. `worker_client` speaks gRPC, `in_process_client` calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from core.errors import DeadlineExceededError, TwostrokeError, WorkerLostError
from core.kv import KVHandle
from core.request import GenerateRequest, RequestKey, SequenceOutput
from core.worker import WorkerInfo, WorkerReport


class WorkerListener(Protocol):
    """Told what the worker says of itself. Called on the event loop; must not block or raise."""

    def worker_reported(self, info: WorkerInfo, report: WorkerReport) -> None: ...

    def worker_lost(self, info: WorkerInfo) -> None:
        """The stream broke or was closed; what was reported over it no longer holds."""


class OutputStream:
    """One request's outputs in order. Iterate once, inside `with`: leaving early aborts it."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._items: deque[SequenceOutput | TwostrokeError] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """What the one reader waits for: half the price of an asyncio.Queue, for every token."""
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SequenceOutput:
        """Raises the error the request ended with; stops after the last output."""
        if self._ended:
            raise StopAsyncIteration
        if not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        item = self._items.popleft()
        error = item if isinstance(item, TwostrokeError) else item.error
        if error is not None:
            # Raised by this router, the worker may still be at it: then close() aborts it.
            self._ended = isinstance(item, SequenceOutput) or isinstance(error, WorkerLostError)
            raise error
        assert isinstance(item, SequenceOutput)
        self._ended = item.is_last
        return item

    def close(self) -> None:
        """Idempotent. Tells the worker, unless the request has ended there."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._ended:
            self._ended = True
            self._abort()

    def put(self, item: SequenceOutput | TwostrokeError) -> None:
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def expire_after(self, seconds: float) -> None:
        """One timer for the whole request: a deadline that costs nothing per token."""
        error = DeadlineExceededError("the request's time ran out")
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self.put, error)


class WorkerConnection(Protocol):
    """`start`, any number of `submit` and `release`, `close`. All on one event loop."""

    info: WorkerInfo | None
    """Who answers there; None while not connected."""
    report: WorkerReport | None
    suspect: bool
    """Silent for long although it has work."""
    num_sessions: int
    streams: Streams

    def start(self) -> None: ...

    async def close(self) -> None:
        """End the session; the worker aborts what is left, and so do its streams here."""

    def submit(
        self,
        request: GenerateRequest,
        handle: KVHandle | None = None,
        *,
        timeout_s: float | None = None,
    ) -> OutputStream:
        """Hand a request over. The stream raises DeadlineExceededError after `timeout_s`.

        Raises WorkerUnavailableError when not connected.
        """

    def release(self, request_id: str, attempt: int) -> None:
        """End a request there, and the lease of a handle that nobody will pull."""


class Streams:
    """The requests that are out over one connection."""

    def __init__(self) -> None:
        self.num_unknown_outputs = 0
        """Outputs of ended attempts: zombies, ignored."""
        self._by_key: dict[RequestKey, OutputStream] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def open(
        self, key: RequestKey, release: Callable[[str, int], None], timeout_s: float | None
    ) -> OutputStream:
        assert key not in self._by_key, f"{key} is already there"
        stream = self._by_key[key] = OutputStream(lambda: release(*key))
        if timeout_s is not None:
            stream.expire_after(timeout_s)
        return stream

    def find(self, key: RequestKey) -> OutputStream | None:
        """None when nobody waits for it any more; that is counted."""
        stream = self._by_key.get(key)
        if stream is None:
            self.num_unknown_outputs += 1
        return stream

    def put(self, stream: OutputStream, output: SequenceOutput) -> None:
        if output.is_last:
            del self._by_key[output.key]
        stream.put(output)

    def forget(self, request_id: str, attempt: int) -> None:
        self._by_key.pop((request_id, attempt), None)

    def end(self, error: TwostrokeError) -> None:
        """All of them, with `error`."""
        streams, self._by_key = self._by_key, {}
        for stream in streams.values():
            stream.put(error)
