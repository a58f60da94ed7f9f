"""A process that is nothing but one router. Imports no worker: it runs where torch is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from core.config import RouterConfig
from deploy.cluster import check_port
from router.server import RouterServer, WorkerEndpoint
from router.tokenizer import load_tokenizer


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
        await asyncio.Event().wait()
    finally:
        await router.stop()
