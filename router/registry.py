"""The workers this router knows: who is connected, how loaded, and what it has in flight there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from core.errors import WorkerUnavailableError
from core.kv import KVHandle
from core.request import GenerateRequest
from core.worker import (
    DISAGGREGATED,
    WorkerId,
    WorkerInfo,
    WorkerReport,
    WorkerRole,
    needed_roles,
)
from router.policy import WorkerSnapshot
from router.worker_connection import OutputStream, WorkerConnection, WorkerListener


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """Where a worker can be reached, and as what."""

    role: WorkerRole
    address: str


Connect = Callable[[WorkerEndpoint, WorkerListener], WorkerConnection]
"""How a worker is reached; the connection is not started yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What every connected worker can take."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One configured worker for people and metrics; `info` and `report` only while connected."""

    endpoint: WorkerEndpoint
    usable: bool
    suspect: bool
    info: WorkerInfo | None
    report: WorkerReport | None
    num_in_flight: int
    num_unknown_outputs: int
    num_sessions: int


class _Worker:
    def __init__(self, endpoint: WorkerEndpoint, client: WorkerConnection) -> None:
        self.endpoint = endpoint
        self.client = client
        self.num_in_flight = 0
        self.num_in_flight_tokens = 0

    def snapshot(self, info: WorkerInfo) -> WorkerSnapshot:
        report = self.client.report
        return WorkerSnapshot(
            worker_id=info.worker_id,
            role=info.role,
            model_fingerprint=info.layout.model,
            block_size=info.layout.block_size,
            max_num_seqs=info.max_num_seqs,
            num_free_blocks=report.num_free_blocks if report else info.num_blocks,
            num_seqs=report.num_waiting + report.num_running if report else 0,
            num_queued_tokens=report.num_queued_tokens if report else 0,
            suspect=self.client.suspect,
            num_in_flight=self.num_in_flight,
            num_in_flight_tokens=self.num_in_flight_tokens,
        )


class WorkerRegistry:
    """All methods belong to one event loop. Workers of another model or role are never used."""

    def __init__(self, model: str, listener: WorkerListener, *, connect: Connect) -> None:
        self.roles: tuple[WorkerRole, ...] = DISAGGREGATED
        """Who must be there for a request; stays while there are no workers at all."""
        self._model = model
        self._listener = listener
        self._connect = connect
        self._workers: dict[WorkerEndpoint, _Worker] = {}
        self._rotations = dict.fromkeys(WorkerRole, 0)

    async def set(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Connect to new ones, drop those not named any more. Idempotent, returns at once but for
        the dropped ones, whose requests are routed again. Raises ConfigError when colocated workers
        and others mix."""
        if endpoints:
            self.roles = needed_roles({endpoint.role for endpoint in endpoints})
        unwanted = [endpoint for endpoint in self._workers if endpoint not in endpoints]
        gone = [self._workers.pop(endpoint) for endpoint in unwanted]
        for endpoint in endpoints:
            if endpoint in self._workers:
                continue
            client = self._connect(endpoint, self._listener)
            self._workers[endpoint] = _Worker(endpoint, client)
            client.start()
        for worker in gone:
            await worker.client.close()

    async def close(self) -> None:
        await self.set(())

    def snapshots(self, role: WorkerRole) -> list[WorkerSnapshot]:
        """The usable workers of `role`, in a stable order."""
        return [worker.snapshot(info) for worker, info in self._usable() if info.role is role]

    def next_rotation(self, role: WorkerRole) -> int:
        """Counts up; policy breaks ties with it. One count per role: with a shared one, two
        workers of a role would see only every second number."""
        self._rotations[role] += 1
        return self._rotations[role]

    def limits(self) -> ModelLimits | None:
        """None while no worker is connected."""
        infos = [info for _, info in self._usable()]
        if not infos:
            return None
        return ModelLimits(
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
        )

    @contextmanager
    def submit(
        self,
        worker_id: WorkerId,
        request: GenerateRequest,
        handle: KVHandle | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[OutputStream]:
        """Have `request` in flight on a worker for as long as the block lasts. Leaving it early
        aborts the request. Raises WorkerUnavailableError when the worker is gone."""
        worker = self._required(worker_id)
        worker.num_in_flight += 1
        try:
            with worker.client.submit(request, handle, timeout_s=timeout_s) as outputs:
                yield outputs
        finally:
            worker.num_in_flight -= 1
            assert worker.num_in_flight >= 0

    @contextmanager
    def computing(self, worker_id: WorkerId, num_tokens: int) -> Iterator[None]:
        """A worker is expected to compute so many prompt tokens before the block is left. Raises
        WorkerUnavailableError when it is gone."""
        worker = self._required(worker_id)
        worker.num_in_flight_tokens += num_tokens
        try:
            yield
        finally:
            worker.num_in_flight_tokens -= num_tokens
            assert worker.num_in_flight_tokens >= 0

    def release(self, worker_id: WorkerId, request_id: str, attempt: int) -> None:
        """End the lease of a handle that nobody will pull. A worker that is gone has none."""
        worker = self._find(worker_id)
        if worker is not None:
            worker.client.release(request_id, attempt)

    def statuses(self) -> list[WorkerStatus]:
        usable = {worker.endpoint for worker, _ in self._usable()}
        return [
            WorkerStatus(
                endpoint=worker.endpoint,
                usable=worker.endpoint in usable,
                suspect=worker.client.suspect,
                info=worker.client.info,
                report=worker.client.report,
                num_in_flight=worker.num_in_flight,
                num_unknown_outputs=worker.client.streams.num_unknown_outputs,
                num_sessions=worker.client.num_sessions,
            )
            for worker in self._workers.values()
        ]

    def _required(self, worker_id: WorkerId) -> _Worker:
        worker = self._find(worker_id)
        if worker is None:  # between choice and submit nothing awaits, but callers may hold ids
            raise WorkerUnavailableError(f"{worker_id} is not connected any more")
        return worker

    def _find(self, worker_id: WorkerId) -> _Worker | None:
        return next((w for w, info in self._usable() if info.worker_id == worker_id), None)

    def _usable(self) -> Iterator[tuple[_Worker, WorkerInfo]]:
        for worker in self._workers.values():
            info = worker.client.info
            if info is None:
                continue
            if info.role is worker.endpoint.role and info.model == self._model:
                yield worker, info
