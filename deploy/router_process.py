"""A process that is nothing but one router. Imports no worker: it runs where torch is not.

Says in its log which of the workers it was told of cannot be used, and when that changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from core.config import RouterConfig
from deploy.cluster import check_port
from router.registry import WorkerStatus
from router.server import RouterServer, WorkerEndpoint
from router.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

POLL_S = 0.5
GRACE_S = 3.0
"""For the first connection to each worker, before it is called unreachable."""


async def serve_router(
    config: RouterConfig, endpoints: Sequence[WorkerEndpoint], ready: Callable[[str], None]
) -> None:
    """Serve until cancelled; `ready` is told the URL. Raises ConfigError for a taken port."""
    check_port(config.host, config.port)
    router = RouterServer(config, await asyncio.to_thread(load_tokenizer, config.model_path))
    try:  # around the start too: it may be cancelled midway
        await router.start()
        await router.set_workers(endpoints)
        ready(router.url)
        await _watch(router)
    finally:
        await router.stop()


async def _watch(router: RouterServer) -> None:
    """For ever: a line for each worker whose state has changed."""
    clock = asyncio.get_running_loop().time
    grace_until = clock() + GRACE_S
    known: dict[WorkerEndpoint, str | None] = {}
    while True:
        for status in router.registry.statuses():
            problem = problem_of(status)
            if problem == known.get(status.endpoint, "") or (problem and clock() < grace_until):
                continue
            known[status.endpoint] = problem
            _tell(status.endpoint, problem)
        await asyncio.sleep(POLL_S)


def problem_of(status: WorkerStatus) -> str | None:
    """Why the router cannot use this worker; None when it can."""
    if status.usable:
        return None
    if status.info is None:
        return "cannot be reached"
    return f"cannot be used: it is a {status.info.role} worker for {status.info.model}"


def _tell(worker: WorkerEndpoint, problem: str | None) -> None:
    name = f"the {worker.role} worker at {worker.address}"
    if problem:
        logger.warning("%s %s; still trying", name, problem)
    else:
        logger.info("%s is reachable", name)
