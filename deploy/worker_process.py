"""The child's side of deploy.processes: `python -m deploy.worker_process FD LOG_LEVEL`."""

from __future__ import annotations

import asyncio
import sys
from multiprocessing.connection import Connection

from core.config import WorkerConfig
from core.errors import InternalError, TwostrokeError
from core.worker import WorkerInfo
from deploy.logs import configure_logging
from deploy.processes import Loading, messages
from deploy.signals import run_until_stopped
from deploy.workers import serve_worker


async def _serve(connection: Connection, config: WorkerConfig) -> int:
    def ready(info: WorkerInfo) -> None:
        connection.send(info)

    def progress(stage: str, fraction: float) -> None:
        connection.send(Loading(stage=stage, fraction=fraction))

    serving = asyncio.create_task(serve_worker(config, ready, progress))
    orphaned = asyncio.create_task(_end_of_file(connection))
    try:
        await asyncio.wait([serving, orphaned], return_when=asyncio.FIRST_COMPLETED)
        return _report(connection, serving)
    finally:
        for task in (serving, orphaned):
            task.cancel()
        await asyncio.wait([serving, orphaned])


def _report(connection: Connection, serving: asyncio.Task[None]) -> int:
    if not serving.done():
        return 0  # the parent is gone: nobody to tell
    error = serving.exception()
    if isinstance(error, TwostrokeError):
        connection.send(error)
    elif error:
        connection.send(InternalError(repr(error)))  # one that surely survives the way
        raise error
    return 1


async def _end_of_file(connection: Connection) -> None:
    async for _ in messages(connection):
        pass


def main(descriptor: str, log_level: str) -> int:
    configure_logging(int(log_level))
    connection = Connection(int(descriptor))
    config = connection.recv()
    return run_until_stopped(lambda: _serve(connection, config), quiet=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
