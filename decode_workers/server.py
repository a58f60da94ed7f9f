"""One decode worker, composed and served: engine, pool, receiver, gRPC."""

from __future__ import annotations

import asyncio
import time

from core.config import WorkerConfig
from core.worker import Progress, WorkerInfo
from decode_workers.peer_client import GrpcPeerClient
from decode_workers.worker import DecodeWorker
from engine.block_pool import BlockPool
from engine.executor import LocalExecutor
from engine.reporter import describe
from kv_transfer.distributed import DistributedTransports
from kv_transfer.receiver import KVReceiver
from protocol.worker_server import WorkerServer


class DecodeServer:
    """`start`, then `wait`, then `stop`. `progress(what, fraction)` is told of loading weights."""

    def __init__(self, config: WorkerConfig, *, progress: Progress | None = None) -> None:
        self._config = config
        self._progress = progress

    async def start(self) -> WorkerInfo:
        """Raises ConfigError for a bad model, shape or a taken port, and leaves nothing behind."""
        self._server = WorkerServer()
        async with self._server.undone_on_failure():
            await self._start(self._config)
        return self.info

    async def _start(self, config: WorkerConfig) -> None:
        port = self._server.bind(config.host, config.port)
        self.executor = await asyncio.to_thread(
            LocalExecutor.from_config, config.engine, self._progress
        )
        self.info = describe(config, self.executor, port=port)
        self.pool = BlockPool.for_cache(self.executor.num_blocks, config.engine.cache)
        self.receiver = KVReceiver(
            self.executor.kv_cache.tensor,
            layout=self.executor.layout,
            config=config.transfer,
            host=config.advertise_host or config.host,
            transports=DistributedTransports(config.transfer.backend),
            peers=lambda address: GrpcPeerClient(address, config.transfer.timeout_s),
            clock=time.monotonic,
            wake=lambda: self._server.step_loop.wake(),
        )
        self.worker = DecodeWorker(
            config.engine, self.executor, self.pool, self.receiver, time.monotonic
        )
        await self._server.start(self.worker, self.info)

    async def wait(self) -> None:
        await self._server.wait()

    async def stop(self) -> None:
        """End streams, the step thread, then transfers and channels."""
        await self._server.stop()
        await asyncio.to_thread(self.receiver.close)
