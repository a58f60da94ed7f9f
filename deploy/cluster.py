"""A running cluster: the router in this process and whoever supervises the workers.

`async with` brings it up (everything ready, or an error and nothing left) and takes it down. While
it runs, the router is told of every worker that comes or goes.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from core.config import ClusterConfig
from core.errors import ConfigError, WorkerUnavailableError
from core.worker import endpoint
from deploy.supervisor import ClusterState
from router.registry import Connect
from router.server import RouterServer, WorkerEndpoint
from router.tokenizer import Tokenizer, load_tokenizer

POLL_S = 5.0
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
CONNECT_S = 20.0
Observer = Callable[[ClusterState], None]
"""Shown every state the workers go through. Called on the event loop; must not block."""


class Controller(Protocol):
    """Keeps workers running somewhere: deploy.supervisor in this process, or one in a Ray actor."""

    async def start(self) -> None: ...

    async def changed(self, version: int, timeout_s: float) -> ClusterState:
        """The state as soon as it is another than `version`, or after `timeout_s`."""

    async def stop(self) -> None:
        """End every worker. Idempotent; works after a failed or cancelled start too."""


def ignore(state: ClusterState) -> None:
    """The observer that does not look."""


def check_port(host: str, port: int) -> None:
    """Fail before weights are loaded, not after. Raises ConfigError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            other = "--port" if getattr(error, "errno", None) in PORT_ERRORS else "--host"
            raise ConfigError(
                f"cannot listen on {endpoint(host, port)} ({reason}); choose another with {other}"
            ) from None


class Cluster:
    """`url` is set while the cluster is up; `state` is the last known state of the workers."""

    def __init__(
        self,
        config: ClusterConfig,
        controller: Controller,
        *,
        observer: Observer = ignore,
        connect: Connect | None = None,
    ) -> None:
        """`connect`: how the router reaches a worker; None: over gRPC."""
        self.config = config
        self.controller = controller
        self.state = ClusterState(version=-1, slots=())
        self.router: RouterServer | None = None
        self._observer = observer
        self._connect = connect
        self._told: list[WorkerEndpoint] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        assert self.router, "the cluster is not up"
        return self.router.url

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:  # cancelled while starting: nothing may be left either
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    async def wait(self) -> None:
        """Serve for ever. Raises when the workers cannot be supervised any more, or when a worker
        is given up."""
        assert self._watcher, "the cluster is not up"
        await asyncio.shield(self._watcher)

    async def _start(self) -> None:
        check_port(self.config.router.host, self.config.router.port)
        tokenizer = await asyncio.to_thread(load_tokenizer, self.config.router.model_path)
        await self._start_workers()
        await self._start_router(tokenizer)
        self._watcher = asyncio.create_task(self._watch())

    async def _start_workers(self) -> None:
        await self.controller.start()
        wanted = sum(self.config.num_workers.values())
        while len(self.state.ready) < wanted:
            await self._observe()

    async def _start_router(self, tokenizer: Tokenizer) -> None:
        # Known before it starts: `_stop` must find it when the start is cancelled midway.
        self.router = RouterServer(self.config.router, tokenizer, connect=self._connect)
        await self.router.start()
        await self._tell_router()
        await self._connected(self.router)

    async def _connected(self, router: RouterServer) -> None:
        """Wait until the router has a stream to every worker: the first request shall not be the
        one that finds out."""
        wanted = self.config.num_workers
        try:
            async with asyncio.timeout(CONNECT_S):
                while {role: len(router.registry.snapshots(role)) for role in wanted} != wanted:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise WorkerUnavailableError("the router cannot reach its workers") from None

    async def _observe(self) -> None:
        """Wait for news of the workers. When one is given up, raises ConfigError if what was asked
        for is to blame, else WorkerUnavailableError."""
        self.state = await self.controller.changed(self.state.version, POLL_S)
        self._observer(self.state)
        for slot in self.state.failed:
            kind = ConfigError if slot.fatal else WorkerUnavailableError
            raise kind(f"{slot.name} cannot be started: {slot.error}")

    async def _watch(self) -> None:
        while True:
            await self._observe()
            await self._tell_router()

    async def _tell_router(self) -> None:
        endpoints = [
            WorkerEndpoint(role=slot.role, address=slot.address)
            for slot in self.state.ready
            if slot.address
        ]
        if self.router and endpoints != self._told:
            await self.router.set_workers(endpoints)
            self._told = endpoints

    async def _stop(self) -> None:
        try:
            if self._watcher:
                self._watcher.cancel()
                await asyncio.wait([self._watcher])
            if self.router:
                await self.router.stop()
        finally:
            await self.controller.stop()
