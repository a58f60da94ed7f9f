"""One decode worker, composed and served: engine, pool, receiver, gRPC."""

from __future__ import annotations

import time
from functools import partial

from core.config import WorkerConfig
from core.worker import Progress, WorkerInfo
from decode_workers.worker import DecodeWorker
from engine.block_pool import BlockPool
from engine.distributed_executor import LaunchRanks
from engine.executor import Executor, open_executor
from engine.reporter import describe
from kv_transfer.distributed import DistributedTransports
from kv_transfer.link import ReceivingRank
from kv_transfer.peer_client import GrpcPeerClient
from kv_transfer.rank_client import RankClient
from kv_transfer.receiver import KVReceiver
from protocol.worker_server import WorkerServer


class DecodeServer:
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
        self.pool = BlockPool.for_cache(self.executor.num_blocks, config.engine.cache)
        here = ReceivingRank(
            self.executor.kv_cache.tensor,
            layouts=self.executor.layouts,
            config=config.transfer,
            host=config.dialled_host,
            transports=DistributedTransports(config.transfer.backend),
            clock=time.monotonic,
        )
        token, timeout_s = self.executor.rank_token, config.transfer.timeout_s
        addresses = self.executor.rank_addresses
        ranks = [RankClient(address, token, timeout_s) for address in addresses]
        self.receiver = KVReceiver(
            here,
            peers=lambda address: GrpcPeerClient(address, timeout_s),
            other_ranks=[rank.link for rank in ranks],
            on_rank_lost=self._server.fail,
            wake=lambda: self._server.step_loop.wake(),
        )
        self._server.closes(self.receiver.close, *(rank.close for rank in ranks))
        self.worker = DecodeWorker(
            config.engine, self.executor, self.pool, self.receiver, time.monotonic
        )
        await self._server.start(self.worker, self.info)

    async def wait(self) -> None:
        await self._server.wait()

    async def stop(self) -> None:
        """End streams, the step thread, transfers and channels, then the other ranks."""
        await self._server.stop()
