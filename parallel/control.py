"""Messages between rank 0 of a worker and its other ranks: plans down, results up.

Bytes over the worker's own gloo group, whatever the collectives of the model run on: a message is
small, lives on the host, and must not wait behind one. Who receives may wait for ever (a worker is
idle as long as nobody asks it anything), but a peer that dies ends the wait at once.
"""

from __future__ import annotations

import struct
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from parallel.rendezvous import rank_lost

MAX_UNREAD = 64
"""Messages that are sent without the oldest having been received."""
_LENGTH = struct.Struct("<q")
_FIRST_BYTES = 4096
"""Of the part that all messages have: the length, and as much as fits. Most end with it."""
_ROOM = _FIRST_BYTES - _LENGTH.size
_TAG = 0
_FOR_EVER_S = 10 * 365 * 86_400.0


class ControlChannel:
    """One rank's end, over a gloo backend. One thread at a time uses it. After a RankLostError it
    cannot be used again.

    Sending does not wait for the receiver but where it is `MAX_UNREAD` messages behind, for
    `timeout_s` at most: gloo moves nothing before a receive is posted, so two that send to each
    other would wait for ever.
    """

    def __init__(self, backend: Any, *, timeout_s: float) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._unread: deque[list[tuple[Any, Tensor]]] = deque()
        """Of each message the operations and what they read, for gloo does not own it. It tells
        that one has ended only to who waits for it."""
        self.rank: int = backend.rank()
        self.size: int = backend.size()

    def broadcast(self, message: bytes) -> None:
        """To all other ranks."""
        self._send(message, [rank for rank in range(self.size) if rank != self.rank])

    def send(self, message: bytes, rank: int) -> None:
        self._send(message, [rank])

    def _send(self, message: bytes, ranks: list[int]) -> None:
        if len(self._unread) == MAX_UNREAD:
            self._await_oldest(self._timeout_s)
        first = _LENGTH.pack(len(message)) + message[:_ROOM]
        parts = [first.ljust(_FIRST_BYTES, b"\0"), message[_ROOM:]]
        self._unread.append([])
        for part in filter(None, parts):
            tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            for rank in ranks:
                self._unread[-1].append((self._start("send", tensor, rank), tensor))

    def flush(self, timeout_s: float = _FOR_EVER_S) -> None:
        """Returns when all that was sent has been received. Raises RankLostError."""
        while self._unread:
            self._await_oldest(timeout_s)

    def _await_oldest(self, timeout_s: float) -> None:
        for work, _ in self._unread.popleft():
            _wait(work, timeout_s)

    def receive(self, rank: int, timeout_s: float = _FOR_EVER_S) -> bytes:
        """The next message of that rank. Raises RankLostError when it is gone, or silent for so
        long."""
        first = self._receive(_FIRST_BYTES, rank, timeout_s)
        (length,) = _LENGTH.unpack_from(first)
        message = first[_LENGTH.size : _LENGTH.size + length]
        missing = length - len(message)
        return message + self._receive(missing, rank, timeout_s) if missing else message

    def _receive(self, size: int, rank: int, timeout_s: float) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        _wait(self._start("recv", buffer, rank), timeout_s)
        return buffer.numpy().tobytes()

    def _start(self, operation: str, tensor: Tensor, rank: int) -> Any:
        try:
            return getattr(self._backend, operation)([tensor], rank, _TAG)
        except RuntimeError as error:
            raise rank_lost(error) from None


def _wait(work: Any, timeout_s: float) -> None:
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise rank_lost(error) from None
