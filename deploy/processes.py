"""Workers as plain subprocesses of this one: real processes to kill, without Ray.

Parent and child share a socket pair. Down it goes the WorkerConfig, up come progress and the
WorkerInfo; its end of file tells either side that the other is gone. Pickled on purpose: both ends
are ours, on one machine, and no network is involved.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from multiprocessing.connection import Connection

from core.config import ClusterConfig, WorkerConfig
from core.errors import WorkerLostError
from core.worker import Progress, WorkerInfo
from deploy.cluster import Cluster, Observer, ignore
from deploy.supervisor import Supervisor

STOP_S = 5.0
"""Between asking a worker to end and ending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    stage: str
    fraction: float


Message = Loading | WorkerInfo | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessWorker:
    process: asyncio.subprocess.Process
    info: WorkerInfo
    connection: Connection

    async def wait(self) -> None:
        code = await self.process.wait()
        raise await self._last_words() or WorkerLostError(describe_exit(code))

    async def _last_words(self) -> Exception | None:
        """What it said of its end, if it came to that."""
        async with aclosing(messages(self.connection)) as stream:
            async for message in stream:
                if isinstance(message, Exception):
                    return message
        return None

    async def stop(self) -> None:
        self.connection.close()
        await end_process(self.process)


def describe_exit(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Ask with SIGTERM, insist with SIGKILL. Returns when it is gone, also when cancelled."""
    try:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class ProcessLauncher:
    async def launch(self, config: WorkerConfig, progress: Progress) -> ProcessWorker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "deploy.worker_process", str(theirs.fileno()),
                str(logging.getLogger().getEffectiveLevel()),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for us; we tell the workers
            )  # fmt: skip
        connection = Connection(ours.detach())
        try:
            connection.send(config)
            info = await self._ready(connection, progress)
        except BaseException as error:
            connection.close()
            await end_process(process)
            if isinstance(error, EOFError):
                raise WorkerLostError(describe_exit(process.returncode or 0)) from None
            raise
        return ProcessWorker(process=process, info=info, connection=connection)

    async def _ready(self, connection: Connection, progress: Progress) -> WorkerInfo:
        async with aclosing(messages(connection)) as stream:
            async for message in stream:
                if isinstance(message, WorkerInfo):
                    return message
                if isinstance(message, Exception):
                    raise message
                progress(message.stage, message.fraction)
        raise EOFError


async def messages(connection: Connection) -> AsyncGenerator[Message, None]:
    """What the other end sends, until it is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        while True:
            await readable.wait()
            readable.clear()
            while connection.poll():
                yield connection.recv()
    except (EOFError, ConnectionResetError):
        return
    finally:
        loop.remove_reader(connection.fileno())


class ProcessCluster(Cluster):
    """The router here, each worker in a process of its own."""

    def __init__(self, config: ClusterConfig, *, observer: Observer = ignore) -> None:
        super().__init__(config, Supervisor(config, ProcessLauncher()), observer=observer)
