"""One worker as a value of its role, and a process that is nothing but one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from colocated_workers.server import ColocatedServer
from core.config import WorkerConfig
from core.worker import Progress, WorkerInfo, WorkerRole
from decode_workers.server import DecodeServer
from prefill_workers.server import PrefillServer


class ServedWorker(Protocol):
    """What all front ends offer: start once, wait, stop."""

    async def start(self) -> WorkerInfo: ...

    async def wait(self) -> None: ...

    async def stop(self) -> None: ...


def make_server(config: WorkerConfig, progress: Progress | None = None) -> ServedWorker:
    match config.role:
        case WorkerRole.PREFILL:
            return PrefillServer(config, progress=progress)
        case WorkerRole.DECODE:
            return DecodeServer(config, progress=progress)
        case WorkerRole.COLOCATED:
            return ColocatedServer(config, progress=progress)


async def serve_worker(
    config: WorkerConfig, ready: Callable[[WorkerInfo], None], progress: Progress | None = None
) -> None:
    """Serve until cancelled or until the worker ends by itself; `ready` is told where it listens.

    Raises ConfigError for a bad model or a taken port.
    """
    server = make_server(config, progress)
    info = await server.start()
    try:
        ready(info)
        await server.wait()
    finally:
        await server.stop()
