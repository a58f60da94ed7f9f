"""How processes find each other: a TCPStore on one host, and gloo between those who meet in it.

Both listen on the given host only: left to itself a TCPStore listens on every interface, and gloo
on whatever the machine's name resolves to.
"""

from __future__ import annotations

import logging
import socket
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # public
from torch.distributed import Store as Store  # type: ignore[attr-defined]

from core.errors import RankLostError

logger = logging.getLogger(__name__)

GLOO_CONNECTS = 5
"""gloo tries this often to reach a peer that died between the store and the pair, each time for the
group's whole timeout."""


class Meeting(NamedTuple):
    """Where a store listens."""

    host: str
    port: int


def host_store(host: str) -> tuple[TCPStore, Meeting]:
    """A store that listens there, on a free port, as long as it lives. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port: int = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, Meeting(host, port)


def join_store(meeting: Meeting, timeout_s: float) -> TCPStore:
    """Raises RuntimeError (torch.distributed.DistError) when it is not there in time."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(*meeting, is_master=False, wait_for_workers=False, timeout=timeout)


def gloo_backend(store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
    """Blocks until all ranks are connected. `host`: of this rank's own sockets."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rank, size, options)


def rank_lost(error: RuntimeError) -> RankLostError:
    """What a failed operation between a worker's ranks means. torch's message names files and
    addresses: it goes to the log, not to the client."""
    logger.warning("a rank is gone: %s", str(error).splitlines()[0])
    return RankLostError("a rank of the worker is gone")
