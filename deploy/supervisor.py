"""Keeps the desired workers running: the shell around the pure controller.

Owns one task per launched worker. How a worker is launched is the Launcher's business (in this
process, as a subprocess, as a Ray actor); when, and when again, is deploy.controller's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from core.config import ClusterConfig, WorkerConfig
from core.errors import ConfigError, TwostrokeError
from core.worker import Progress, WorkerInfo
from deploy.controller import (
    NOTHING,
    Desired,
    Phase,
    WorkerSlot,
    WorkerSlots,
    died,
    progressed,
    reconcile,
    started,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


class RunningWorker(Protocol):
    """One live worker."""

    @property
    def info(self) -> WorkerInfo: ...

    async def wait(self) -> None:
        """Returns or raises when the worker has ended by itself."""

    async def stop(self) -> None:
        """End it, whatever state it is in. Idempotent."""


class Launcher(Protocol):
    async def launch(self, config: WorkerConfig, progress: Progress) -> RunningWorker:
        """Returns when the worker serves. Raises, leaving nothing behind, when it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """`version` changes whenever anything else does."""

    version: int
    slots: tuple[WorkerSlot, ...]

    @property
    def ready(self) -> tuple[WorkerSlot, ...]:
        return tuple(slot for slot in self.slots if slot.phase is Phase.READY)

    @property
    def failed(self) -> tuple[WorkerSlot, ...]:
        return tuple(slot for slot in self.slots if slot.phase is Phase.FAILED)


class Supervisor:
    """`start`, any number of `scale`, `stop`. All on one event loop."""

    def __init__(self, config: ClusterConfig, launcher: Launcher) -> None:
        self._config = config
        self._launcher = launcher
        self._desired = NOTHING
        self._slots: WorkerSlots = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        config = self._config
        await self.scale(
            Desired(
                num_prefill=config.prefill.count,
                num_decode=config.decode.count,
                num_colocated=config.colocated.count,
            )
        )

    async def scale(self, desired: Desired) -> None:
        """Change how many workers there should be; returns at once."""
        self._desired = desired
        self._reconcile()

    async def stop(self) -> None:
        """Returns when every worker has ended."""
        tasks = list(self._tasks.values())
        await self.scale(NOTHING)
        await asyncio.gather(*tasks, return_exceptions=True)

    def state(self) -> ClusterState:
        return ClusterState(version=self._version, slots=tuple(self._slots.values()))

    async def changed(self, version: int, timeout_s: float) -> ClusterState:
        """The state as soon as it is another than `version`, or after `timeout_s`."""
        if self._version == version:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self.state()

    def _reconcile(self) -> None:
        plan = reconcile(self._desired, self._slots, time.monotonic())
        self._set(plan.slots)
        for slot in plan.stop:
            self._tasks[slot.name].cancel()
        for slot in plan.launch:
            predecessor = self._tasks.get(slot.name)
            self._tasks[slot.name] = asyncio.create_task(self._run(slot, predecessor))
        self._set_alarm(plan.wake_at)

    def _set(self, slots: WorkerSlots) -> None:
        if slots != self._slots:
            self._slots = slots
            self._version += 1
            self._changed.set()
            self._changed = asyncio.Event()

    def _set_alarm(self, wake_at: float | None) -> None:
        if self._alarm:
            self._alarm.cancel()
        delay = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        loop = asyncio.get_running_loop()
        self._alarm = None if delay is None else loop.call_later(delay, self._reconcile)

    async def _run(self, slot: WorkerSlot, predecessor: asyncio.Task[None] | None) -> None:
        """One launch of `slot`, from start to death. Cancelled: stop the worker."""
        if predecessor:
            await asyncio.wait([predecessor])
        try:
            await self._serve(slot)
            error: Exception = RuntimeError("it ended by itself")
        except Exception as caught:  # whatever it is, it is why this worker is no more
            error = caught
        logger.info("%s died: %s", slot.name, error)
        self._died(slot, error)

    async def _serve(self, slot: WorkerSlot) -> None:
        worker = await self._launcher.launch(self._worker_config(slot), self._progress(slot))
        try:
            info = worker.info
            logger.info("%s serves on %s (pid %d)", info.worker_id, info.address, info.pid)
            self._set(
                started(
                    self._slots, slot.name, slot.launch,
                    address=info.address, pid=info.pid, now=time.monotonic(),
                )
            )  # fmt: skip
            await worker.wait()
        finally:
            await self._stop_worker(worker)

    async def _stop_worker(self, worker: RunningWorker) -> None:
        """A stop that fails must not hide why the worker died: it is logged, not raised."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await worker.stop()
        except Exception as error:
            logger.warning("%s did not stop cleanly: %r", worker.info.worker_id, error)

    def _died(self, slot: WorkerSlot, error: Exception) -> None:
        message = error.message if isinstance(error, TwostrokeError) else str(error) or repr(error)
        self._set(
            died(
                self._slots, slot.name, slot.launch,
                error=message, fatal=isinstance(error, ConfigError), now=time.monotonic(),
            )
        )  # fmt: skip
        self._reconcile()

    def _worker_config(self, slot: WorkerSlot) -> WorkerConfig:
        return WorkerConfig(
            name=slot.name,
            role=slot.role,
            served_model_name=self._config.router.served_model_name,
            engine=self._config.engine_of(slot.role),
            transfer=self._config.transfer,
        )

    def _progress(self, slot: WorkerSlot) -> Progress:
        loop = asyncio.get_running_loop()

        def report(stage: str, fraction: float) -> None:
            loop.call_soon_threadsafe(self._progressed, slot, stage, fraction)

        return report

    def _progressed(self, slot: WorkerSlot, stage: str, fraction: float) -> None:
        self._set(progressed(self._slots, slot.name, slot.launch, stage, fraction))
