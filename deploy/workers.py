"""One worker as a value of its role, and a process that is nothing but one worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from colocated_workers.server import ColocatedServer
from core.config import EngineConfig, TransferConfig, WorkerConfig
from core.worker import Progress, WorkerInfo, WorkerRole
from decode_workers.server import DecodeServer
from deploy.rank_processes import LocalRanks
from engine.distributed_executor import RankProcesses
from parallel.rendezvous import Meeting
from prefill_workers.server import PrefillServer


class ServedWorker(Protocol):
    """What all front ends offer: start once, wait, stop."""

    async def start(self) -> WorkerInfo: ...

    async def wait(self) -> None: ...

    async def stop(self) -> None: ...


class RankLauncher(Protocol):
    """A LaunchRanks (engine/distributed_executor.py) that is told how KV is transferred."""

    def __call__(
        self,
        config: EngineConfig,
        meeting: Meeting,
        on_death: Callable[[str], None],
        transfer: TransferConfig,
    ) -> RankProcesses: ...


def make_server(
    config: WorkerConfig, progress: Progress | None = None, ranks: RankLauncher = LocalRanks
) -> ServedWorker:
    launch_ranks = partial(ranks, transfer=config.transfer)
    match config.role:
        case WorkerRole.PREFILL:
            return PrefillServer(config, progress=progress, launch_ranks=launch_ranks)
        case WorkerRole.DECODE:
            return DecodeServer(config, progress=progress, launch_ranks=launch_ranks)
        case WorkerRole.COLOCATED:
            return ColocatedServer(config, progress=progress, launch_ranks=launch_ranks)


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
