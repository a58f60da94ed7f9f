"""Channels over torch.distributed, gloo or nccl: the only file here that imports it.

Each channel is a two-rank process group of its own: rank 0 sends, rank 1 receives. No default group
is ever made. The receiver hosts the TCPStore where the two meet, on a socket bound to its own host
only (parallel/rendezvous.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.errors import TransferError
from core.kv import ChannelOffer
from kv_transfer.transport import Transport
from parallel import rendezvous
from parallel.rendezvous import Store

logger = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1
_TAG, _ABORT_TAG = 0, 1
_AT_ONCE = timedelta(milliseconds=1)


class _Recv:
    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, timeout_s: float) -> None:
        _wait(self._work, self._tensor, timeout_s)


class DistributedTransport:
    """One end of a two-rank group. After a failure or `close` it cannot be used again."""

    def __init__(self, group: Any, store: Store, peer: int) -> None:
        self._group: Any = group
        self._store: Store | None = store
        self._peer = peer
        self._closing = threading.Lock()

    def send(self, tensor: Tensor, timeout_s: float) -> None:
        _wait(self._start("send", tensor), tensor, timeout_s)

    def post_recv(self, tensor: Tensor) -> _Recv:
        return _Recv(self._start("recv", tensor), tensor)

    def _start(self, operation: str, tensor: Tensor) -> Any:
        group = self._group
        if group is None:
            raise TransferError("the KV channel is closed")
        try:
            return getattr(group, operation)([tensor], self._peer, _TAG)
        except RuntimeError as error:
            raise _failed(error) from None

    def close(self) -> None:
        """Ends what is pending, in whichever thread waits for it; the group goes when the last of
        those has let go of it."""
        with self._closing:
            group, self._group, self._store = self._group, None, None
            if group is not None:
                _abort(group, self._peer)


def _abort(group: Any, peer: int) -> None:
    """gloo's own abort and shutdown leave pending operations waiting. But when any wait times out,
    gloo closes the group's socket pairs and fails every operation on them: so we let one time out.
    """
    with contextlib.suppress(RuntimeError):
        if group.name() == "nccl":
            group.abort()
        else:
            group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(_AT_ONCE)


def _wait(work: Any, tensor: Tensor, timeout_s: float) -> None:
    if timeout_s <= 0:
        raise TransferError("the KV transfer's time ran out")
    try:
        work.wait(timedelta(seconds=timeout_s))
        if tensor.is_cuda:  # nccl's wait only orders the stream
            torch.cuda.current_stream(tensor.device).synchronize()
    except RuntimeError as error:
        raise _failed(error) from None


def _failed(error: RuntimeError) -> TransferError:
    """torch's message names files and addresses; it goes to the log, not to the client."""
    logger.warning("a KV channel failed: %s", str(error).splitlines()[0])
    return TransferError("the KV channel broke or timed out")


def _new_group(backend: str, store: Store, rank: int, host: str, timeout_s: float) -> Any:
    """Blocks until both ranks are here, for at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    store.set(f"rank {rank}", "is here")
    store.wait([f"rank {1 - rank}"], _seconds(timeout_s))
    left = deadline - time.monotonic()
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = _seconds(left)
        return dist.ProcessGroupNCCL(store, rank, 2, nccl)
    timeout_s = max(left / rendezvous.GLOO_CONNECTS, 0.001)
    return rendezvous.gloo_backend(store, rank, 2, host=host, timeout_s=timeout_s)


def _seconds(left: float) -> timedelta:
    return timedelta(seconds=max(left, 0.001))


class _Listener:
    def __init__(self, backend: str, host: str) -> None:
        self._backend = backend
        self._host = host
        try:
            store, self.meeting = rendezvous.host_store(host)
        except OSError as error:
            raise TransferError(f"cannot listen on {host} for KV transfer") from error
        self._store: Store | None = store

    def accept(self, timeout_s: float) -> Transport:
        store = self._store
        assert store is not None, "accept after close"
        try:
            store.set_timeout(_seconds(timeout_s))
            group = _new_group(self._backend, store, RECEIVER, self._host, timeout_s)
        except RuntimeError as error:
            raise _failed(error) from None
        return DistributedTransport(group, store, SENDER)

    def close(self) -> None:
        self._store = None  # a store ends with its last reference


class DistributedTransports:
    """Factory for one backend: "gloo" for CPU pools, "nccl" for CUDA pools."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def listen(self, channel_id: str, host: str) -> _Listener:
        return _Listener(self.backend, host)

    def join(self, offer: ChannelOffer, host: str, timeout_s: float) -> Transport:
        deadline = time.monotonic() + timeout_s
        try:
            meeting = rendezvous.Meeting(offer.store_host, offer.store_port)
            store = rendezvous.join_store(meeting, timeout_s)
            left = deadline - time.monotonic()
            group = _new_group(self.backend, store, SENDER, host, left)
        except RuntimeError as error:
            raise _failed(error) from None
        return DistributedTransport(group, store, RECEIVER)
