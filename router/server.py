"""One router: its parts put together, on an HTTP port, in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from uuid import uuid4

import uvicorn

from core.config import RouterConfig
from core.errors import ConfigError
from core.worker import WorkerInfo, WorkerReport
from router.api import Gateway, build_app
from router.generate import Fleet
from router.http_exchange import AbortableProtocol
from router.metrics import RouterMetrics
from router.prefix_index import MemoryPrefixIndex, PrefixIndex
from router.registry import Connect, WorkerEndpoint, WorkerRegistry
from router.request_limit import RequestLimit
from router.request_log import RequestLog
from router.tokenizer import Tokenizer
from router.worker_client import WorkerClient
from router.worker_connection import WorkerConnection, WorkerListener

__all__ = ["RouterServer", "WorkerEndpoint"]

logger = logging.getLogger(__name__)

SHUTDOWN_S = 3
BACKLOG = 2048


class RouterServer:
    """`start`, any number of `set_workers`, `stop`. Installs no signal handlers."""

    def __init__(
        self, config: RouterConfig, tokenizer: Tokenizer, *, connect: Connect | None = None
    ) -> None:
        """`connect` None: every worker over gRPC."""
        self._config = config
        index = MemoryPrefixIndex()
        self.registry = WorkerRegistry(
            config.served_model_name, _IndexFeed(index), connect=connect or over_grpc()
        )
        metrics = RouterMetrics(self.registry.statuses)
        gateway = Gateway(
            config=config,
            tokenizer=tokenizer,
            fleet=Fleet(
                registry=self.registry,
                index=index,
                max_attempts=config.max_attempts,
                on_retry=metrics.retried,
            ),
            limit=RequestLimit(config.max_concurrent_requests),
            requests=RequestLog(config.served_model_name),
            metrics=metrics,
            started=int(time.time()),
        )
        self._server = _Server(
            uvicorn.Config(
                build_app(gateway),
                http=AbortableProtocol,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                backlog=BACKLOG,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        assert self._socket, "the router is not started"
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        host = self._config.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Returns when it listens. Raises ConfigError when the port cannot be had."""
        self._socket = _listen(self._config.host, self._config.port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.002)
        if self._serving.done():
            self._serving.result()
            raise ConfigError("the HTTP server ended at once")
        logger.info("serving %s on %s", self._config.served_model_name, self.url)

    async def set_workers(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """These workers and no others. Idempotent; connecting goes on in the background."""
        await self.registry.set(endpoints)

    async def stop(self) -> None:
        """Requests still running end with an error. Idempotent; works after a failed start too."""
        self._server.should_exit = True
        await self.registry.close()
        if self._serving is not None:
            await asyncio.wait([self._serving])
            self._serving = None
        if cancelled := self._server.server_state.tasks:  # uvicorn does not wait for their end
            await asyncio.wait(tuple(cancelled))
        if self._socket is not None:
            self._socket.close()


def over_grpc() -> Connect:
    """As one router: workers see one and the same id in all its sessions."""
    router_id = uuid4().hex

    def connect(worker: WorkerEndpoint, listener: WorkerListener) -> WorkerConnection:
        return WorkerClient(worker.address, listener, router_id=router_id)

    return connect


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever owns the process."""
        yield


class _IndexFeed:
    """Workers' reports go into the prefix index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def worker_reported(self, info: WorkerInfo, report: WorkerReport) -> None:
        self._index.apply(info.worker_id, report)

    def worker_lost(self, info: WorkerInfo) -> None:
        self._index.remove(info.worker_id)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
