"""One colocated worker, composed and served: engine and gRPC."""

from __future__ import annotations

import asyncio
import secrets
import time

from colocated_workers.worker import ColocatedWorker
from core.config import WorkerConfig
from core.worker import Progress, WorkerId, WorkerInfo, endpoint
from engine.executor import LocalExecutor
from engine.model_runner import ModelRunner
from engine.reporter import describe
from protocol.session import SessionHub
from protocol.worker_server import WorkerServer


class ColocatedServer:
    """`start`, then `wait`, then `stop`. `progress(what, fraction)` is told of loading weights."""

    def __init__(self, config: WorkerConfig, *, progress: Progress | None = None) -> None:
        self._config = config
        self._progress = progress

    async def start(self) -> WorkerInfo:
        """Raises ConfigError for a bad model, shape or a taken port, and leaves nothing behind."""
        self._server = WorkerServer()
        try:
            return await self._start()
        except BaseException:
            await self._server.stop(0)
            raise

    async def _start(self) -> WorkerInfo:
        config = self._config
        port = self._server.bind(config.host, config.port)
        self.executor = LocalExecutor(await asyncio.to_thread(self._load))
        self.worker = ColocatedWorker(config.engine, self.executor, time.monotonic)
        self.pool = self.worker.engine.pool
        self.info = describe(
            config,
            self.executor,
            worker_id=WorkerId(name=config.name, incarnation=secrets.token_hex(8)),
            address=endpoint(config.advertise_host or config.host, port),
            max_model_len=self.worker.engine.max_model_len,
        )
        await self._server.start(self.worker, self.info)
        return self.info

    @property
    def hub(self) -> SessionHub:
        """For a router in this process."""
        assert self._server.hub is not None, "the worker is not started"
        return self._server.hub

    def _load(self) -> ModelRunner:
        return ModelRunner(self._config.engine, progress=self._progress)

    async def wait(self) -> None:
        await self._server.wait()

    async def stop(self) -> None:
        """End streams, then the step thread."""
        await self._server.stop()
