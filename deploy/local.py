"""The whole cluster in one process, without Ray: the same parts over loopback. Tests use it."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import ClusterConfig, WorkerConfig
from core.worker import Progress, WorkerInfo
from deploy.cluster import Cluster, Observer, ignore
from deploy.supervisor import Supervisor
from deploy.workers import ServedWorker, make_server


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessWorker:
    server: ServedWorker
    info: WorkerInfo

    async def wait(self) -> None:
        await self.server.wait()

    async def stop(self) -> None:
        await self.server.stop()


class InProcessLauncher:
    """Workers share this event loop; each steps in a thread of its own."""

    async def launch(self, config: WorkerConfig, progress: Progress) -> InProcessWorker:
        server = make_server(config, progress)
        return InProcessWorker(server=server, info=await server.start())


class LocalCluster(Cluster):
    """`async with LocalCluster(config) as cluster: ... cluster.url`"""

    def __init__(self, config: ClusterConfig, *, observer: Observer = ignore) -> None:
        super().__init__(config, Supervisor(config, InProcessLauncher()), observer=observer)
