"""Channels between two threads of one process, with NCCL's manners: a send without a posted receive
fails. What passes here only because gloo is forgiving would fail, so tests find it without a GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from core.errors import TransferError
from core.kv import ChannelOffer
from parallel.rendezvous import Meeting

POST_GRACE_S = 0.2
"""How long a send waits for its receive: the two ends' threads race a little."""


class _Slot:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.filled = False


class _Pipe:
    """Both ends of one channel. Everything happens under `changed`: once `closed` is set, nothing
    writes into a posted tensor."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted: deque[_Slot] = deque()
        self.joined = False
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def wait_for(self, is_so: Callable[[], object], timeout_s: float) -> bool:
        """False, and closed, when it does not come true in time. Needs the lock."""
        self.changed.wait_for(lambda: self.closed or is_so(), max(0.0, timeout_s))
        if not is_so():
            self.close()
        return not self.closed


class _Recv:
    def __init__(self, pipe: _Pipe, slot: _Slot) -> None:
        self._pipe = pipe
        self._slot = slot

    def wait(self, timeout_s: float) -> None:
        with self._pipe.changed:
            self._pipe.wait_for(lambda: self._slot.filled, timeout_s)
            if not self._slot.filled:
                raise TransferError("the KV channel broke or timed out")


class LoopbackTransport:
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def send(self, tensor: Tensor, timeout_s: float) -> None:
        pipe = self._pipe
        with pipe.changed:
            if not pipe.wait_for(lambda: pipe.posted, min(timeout_s, POST_GRACE_S)):
                raise TransferError("the KV channel is closed, or no receive was posted")
            slot = pipe.posted.popleft()
            assert slot.tensor.shape == tensor.shape, "both ends must plan the same messages"
            slot.tensor.copy_(tensor)
            slot.filled = True
            pipe.changed.notify_all()

    def post_recv(self, tensor: Tensor) -> _Recv:
        pipe = self._pipe
        with pipe.changed:
            if pipe.closed:
                raise TransferError("the KV channel is closed")
            slot = _Slot(tensor)
            pipe.posted.append(slot)
            pipe.changed.notify_all()
        return _Recv(pipe, slot)

    def close(self) -> None:
        self._pipe.close()


class _Listener:
    meeting = Meeting(host="loopback", port=0)

    def __init__(self, pipe: _Pipe, stop: Callable[[], object]) -> None:
        self._pipe = pipe
        self._stop = stop

    def accept(self, timeout_s: float) -> LoopbackTransport:
        pipe = self._pipe
        with pipe.changed:
            if not pipe.wait_for(lambda: pipe.joined, timeout_s):
                raise TransferError("the KV channel broke or timed out")
        return LoopbackTransport(pipe)

    def close(self) -> None:
        self._stop()


class LoopbackTransports:
    """Both ends must come from the same instance."""

    backend = "loopback"

    def __init__(self) -> None:
        self._pipes: dict[str, _Pipe] = {}

    def listen(self, channel_id: str, host: str) -> _Listener:
        pipe = self._pipes[channel_id] = _Pipe()
        return _Listener(pipe, lambda: self._pipes.pop(channel_id, None))

    def join(self, offer: ChannelOffer, host: str, timeout_s: float) -> LoopbackTransport:
        pipe = self._pipes.pop(offer.channel_id, None)
        if pipe is None:
            raise TransferError("nobody offers this KV channel")
        with pipe.changed:
            pipe.joined = True
            pipe.changed.notify_all()
        return LoopbackTransport(pipe)
