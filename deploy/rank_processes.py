"""The other ranks of a worker as subprocesses of its rank 0, on the same machine.

`python -m deploy.rank_processes FD LOG_LEVEL` is the child's side. Parent and child share a socket
pair: down it goes what the rank must know, and its end of file tells either side that the other is
gone. Pickled on purpose: both ends are ours, on one machine, and no network is involved.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

from core.config import EngineConfig, TransferConfig
from core.errors import TwostrokeError
from deploy.logs import configure_logging
from engine.distributed_executor import follow
from kv_transfer.service import RankKVServer
from parallel.rendezvous import Meeting

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    config: EngineConfig
    transfer: TransferConfig
    meeting: Meeting
    rank: int


class _RankProcess(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: Connection
    watch: threading.Thread
    """Ends with the process."""


class LocalRanks:
    """RankProcesses (engine/distributed_executor.py) on this machine."""

    def __init__(
        self,
        config: EngineConfig,
        meeting: Meeting,
        on_death: Callable[[str], None],
        transfer: TransferConfig,
    ) -> None:
        self._on_death = on_death
        self._closing = False
        self._ended: list[str] = []
        self._ranks = [
            self._start(RankTask(config=config, transfer=transfer, meeting=meeting, rank=rank))
            for rank in range(1, config.parallel.world_size)
        ]

    def _start(self, task: RankTask) -> _RankProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.rank_processes", str(theirs.fileno()),
                 str(logging.getLogger().getEffectiveLevel())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for rank 0; it tells the others
            )  # fmt: skip
        connection = Connection(ours.detach())
        watch = threading.Thread(
            target=self._watch, args=(task.rank, process), name="rank-watch", daemon=True
        )
        watch.start()
        connection.send(task)
        return _RankProcess(process, connection, watch)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._ended.append(f"rank {rank} of the worker ended with exit code {code}")
            self._on_death(self._ended[-1])

    def failure(self) -> str | None:
        return self._ended[0] if self._ended else None

    def close(self, grace_s: float) -> None:
        self._closing = True
        deadline = time.monotonic() + grace_s
        for rank in self._ranks:
            rank.watch.join(max(deadline - time.monotonic(), 0.0))
            if rank.watch.is_alive():
                rank.process.kill()
                rank.watch.join()
            rank.connection.close()


def _end_with_parent(connection: Connection) -> None:
    """Its end of file comes when rank 0 is gone, whatever this rank waits for."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)


def main(descriptor: str, log_level: str) -> int:
    configure_logging(int(log_level))
    connection = Connection(int(descriptor))
    task: RankTask = connection.recv()
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    host = task.meeting.host
    try:
        make_service = partial(RankKVServer, host, task.transfer)
        follow(task.meeting, task.rank, task.config, make_service, host=host)
    except TwostrokeError as error:
        logger.error("rank %d: %s", task.rank, error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
