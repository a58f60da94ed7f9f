"""The whole cluster in one process, without Ray: for one small machine, and for tests.

Colocated workers are not even dialled: the router hands them requests and gets outputs as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from colocated_workers.server import ColocatedServer
from core.config import ClusterConfig, WorkerConfig
from core.worker import Progress, WorkerInfo
from deploy.cluster import Cluster, Observer, ignore
from deploy.supervisor import Supervisor
from deploy.workers import ServedWorker, make_server
from protocol.session import SessionHub
from router.in_process_client import InProcessClient
from router.registry import WorkerEndpoint
from router.server import over_grpc
from router.worker_connection import WorkerConnection, WorkerListener


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

    def __init__(self) -> None:
        self._hubs: WeakValueDictionary[str, SessionHub] = WeakValueDictionary()
        """Of colocated workers that live, by address: an ended one must not keep its model here."""
        self._dial = over_grpc()

    async def launch(self, config: WorkerConfig, progress: Progress) -> InProcessWorker:
        server = make_server(config, progress)
        info = await server.start()
        if isinstance(server, ColocatedServer):
            self._hubs[info.address] = server.hub
        return InProcessWorker(server=server, info=info)

    def connect(self, worker: WorkerEndpoint, listener: WorkerListener) -> WorkerConnection:
        hub = self._hubs.get(worker.address)
        if hub is None:
            return self._dial(worker, listener)
        return InProcessClient(hub, listener)


class LocalCluster(Cluster):
    """`async with LocalCluster(config) as cluster: ... cluster.url`"""

    def __init__(self, config: ClusterConfig, *, observer: Observer = ignore) -> None:
        launcher = InProcessLauncher()
        super().__init__(
            config, Supervisor(config, launcher), observer=observer, connect=launcher.connect
        )
