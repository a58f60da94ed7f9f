"""One colocated worker, composed and served: engine and gRPC."""

from __future__ import annotations

import time
from functools import partial

from colocated_workers.worker import ColocatedWorker
from core.config import WorkerConfig
from core.worker import Progress, WorkerInfo
from engine.distributed_executor import LaunchRanks
from engine.executor import Executor, open_executor
from engine.reporter import describe
from protocol.session import SessionHub
from protocol.worker_server import WorkerServer


class ColocatedServer:
    """`start`, then `wait`, then `stop`. `progress(what, fraction)` is told of loading weights;
    `launch_ranks` starts the other ranks of a worker that has several."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        progress: Progress | None = None,
        launch_ranks: LaunchRanks | None = None,
    ) -> None:
        self._config = config
        self._progress = progress
        self._launch_ranks = launch_ranks

    async def start(self) -> WorkerInfo:
        """Raises ConfigError for a bad model, shape or a taken port, and leaves nothing behind."""
        self._server = WorkerServer()
        async with self._server.undone_on_failure():
            await self._start(self._config)
        return self.info

    async def _start(self, config: WorkerConfig) -> None:
        port = self._server.bind(config.host, config.port)
        self.executor: Executor = await self._server.open(
            partial(
                open_executor,
                config.engine,
                host=config.dialled_host,
                launch_ranks=self._launch_ranks,
                on_death=self._server.fail,
                progress=self._progress,
            )
        )
        self.info = describe(config, self.executor, port=port)
        self.worker = ColocatedWorker(config.engine, self.executor, time.monotonic)
        self.pool = self.worker.engine.pool
        await self._server.start(self.worker, self.info)

    @property
    def hub(self) -> SessionHub:
        """For a router in this process."""
        assert self._server.hub is not None, "the worker is not started"
        return self._server.hub

    async def wait(self) -> None:
        await self._server.wait()

    async def stop(self) -> None:
        """End streams, then the step thread."""
        await self._server.stop()
