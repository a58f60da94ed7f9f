"""Channels between two threads of one process, with NCCL's manners: a send without a posted receive
fails. What passes here only because gloo is forgiving would fail, so tests find it without a GPU.
"""

from __future__ import annotations

import queue
import threading

from torch import Tensor

from core.errors import TransferError
from core.kv import ChannelOffer
from kv_transfer.transport import Meeting

POST_GRACE_S = 0.2
"""How long a send waits for its receive: the two ends' threads race a little."""


class _Slot:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.filled = threading.Event()


class _Pipe:
    def __init__(self) -> None:
        self.posted: queue.Queue[_Slot] = queue.Queue()
        self.joined = threading.Event()
        self.closed = threading.Event()


class _Recv:
    def __init__(self, pipe: _Pipe, slot: _Slot) -> None:
        self._pipe = pipe
        self._slot = slot

    def wait(self, timeout_s: float) -> None:
        deadline = timeout_s
        while not self._slot.filled.wait(min(0.01, max(deadline, 0.0))):
            deadline -= 0.01
            if self._pipe.closed.is_set() or deadline <= 0:
                self._pipe.closed.set()
                raise TransferError("the KV channel broke or timed out")


class LoopbackTransport:
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def send(self, tensor: Tensor, timeout_s: float) -> None:
        if self._pipe.closed.is_set():
            raise TransferError("the KV channel is closed")
        try:
            slot = self._pipe.posted.get(timeout=min(timeout_s, POST_GRACE_S))
        except queue.Empty:
            self._pipe.closed.set()
            raise TransferError("a send found no posted receive") from None
        assert slot.tensor.shape == tensor.shape, "both ends must plan the same messages"
        slot.tensor.copy_(tensor)
        slot.filled.set()

    def post_recv(self, tensor: Tensor) -> _Recv:
        if self._pipe.closed.is_set():
            raise TransferError("the KV channel is closed")
        slot = _Slot(tensor)
        self._pipe.posted.put(slot)
        return _Recv(self._pipe, slot)

    def close(self) -> None:
        self._pipe.closed.set()


class _Listener:
    meeting = Meeting(host="loopback", port=0)

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def accept(self, timeout_s: float) -> LoopbackTransport:
        if not self._pipe.joined.wait(timeout_s):
            raise TransferError("the KV channel broke or timed out")
        return LoopbackTransport(self._pipe)

    def close(self) -> None:
        self._pipe.closed.set()


class LoopbackTransports:
    """Both ends must come from the same instance."""

    backend = "loopback"

    def __init__(self) -> None:
        self._pipes: dict[str, _Pipe] = {}

    def listen(self, channel_id: str, host: str) -> _Listener:
        pipe = self._pipes[channel_id] = _Pipe()
        return _Listener(pipe)

    def join(self, offer: ChannelOffer, host: str, timeout_s: float) -> LoopbackTransport:
        pipe = self._pipes.get(offer.channel_id)
        if pipe is None or pipe.closed.is_set():
            raise TransferError("nobody offers this KV channel")
        pipe.joined.set()
        return LoopbackTransport(pipe)
