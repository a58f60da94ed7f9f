"""One prefill worker, composed and served: engine, pool, sender, gRPC."""

from __future__ import annotations

import time
from functools import partial

from core.config import WorkerConfig
from core.worker import Progress, WorkerInfo
from engine.block_pool import BlockPool
from engine.distributed_executor import LaunchRanks
from engine.executor import Executor, open_executor
from engine.reporter import describe
from kv_transfer.distributed import DistributedTransports
from kv_transfer.rank_client import RankClient
from kv_transfer.rank_sender import RankSender
from kv_transfer.sender import KVSender
from prefill_workers.service import KVPeerServicer
from prefill_workers.worker import PrefillWorker
from protocol.worker_pb2_grpc import add_KVPeerServicer_to_server
from protocol.worker_server import WorkerServer


class PrefillServer:
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
        transports = DistributedTransports(config.transfer.backend)
        here = RankSender(
            self.executor.kv_cache.tensor,
            layout=self.executor.layout,
            host=config.dialled_host,
            config=config.transfer,
            transports=transports,
            clock=time.monotonic,
        )
        token, timeout_s = self.executor.rank_token, config.transfer.timeout_s
        addresses = self.executor.rank_addresses
        others = [RankClient(address, token, timeout_s) for address in addresses]
        self.sender = KVSender(
            [here, *others],
            layouts=self.executor.layouts,
            incarnation=self.info.worker_id.incarnation,
            worker=config.name,
            address=self.info.address,
            config=config.transfer,
            backend=transports.backend,
            clock=time.monotonic,
        )
        self.worker = PrefillWorker(
            config.engine, self.executor, self.pool, self.sender, time.monotonic
        )
        peers = KVPeerServicer(self.sender)
        self._server.closes(peers.close, self.sender.close)
        add_KVPeerServicer_to_server(peers, self._server.server)
        await self._server.start(self.worker, self.info)

    async def wait(self) -> None:
        await self._server.wait()

    async def stop(self) -> None:
        """End streams, the step thread, transfers and channels, then the other ranks."""
        await self._server.stop()
