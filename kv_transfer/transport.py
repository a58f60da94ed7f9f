"""The seam under a channel: how the bytes of one (sender, receiver) pair move.

Rules that NCCL enforces and gloo forgives: the receive is posted before the sender is told; both
ends run the same messages in the same order; after any failure the channel is dead and a new one is
built under a fresh id. Every failure is a TransferError.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from core.errors import TwostrokeError, error_from_code
from core.kv import ChannelOffer
from parallel.rendezvous import Meeting


class PendingRecv(Protocol):
    def wait(self, timeout_s: float) -> None:
        """Returns when the tensor is filled."""


class Transport(Protocol):
    """One end of a channel. One thread at a time sends or receives."""

    def send(self, tensor: Tensor, timeout_s: float) -> None:
        """Returns when `tensor` may be overwritten."""

    def post_recv(self, tensor: Tensor) -> PendingRecv: ...

    def close(self) -> None:
        """From any thread, idempotent. Pending operations of both ends fail at once; when it
        returns, nothing writes into the tensor of a receive posted here."""


class Listener(Protocol):
    """The receiver's half of a channel that nobody has joined yet."""

    @property
    def meeting(self) -> Meeting: ...

    def accept(self, timeout_s: float) -> Transport:
        """The receiver's end, once the sender has joined."""

    def close(self) -> None:
        """Stop listening. Ends neither an accepted channel nor another thread's `accept`."""


class TransportFactory(Protocol):
    """Makes both ends of channels; `backend` is what an offer must name to be joined here."""

    @property
    def backend(self) -> str: ...

    def listen(self, channel_id: str, host: str) -> Listener: ...

    def join(self, offer: ChannelOffer, host: str, timeout_s: float) -> Transport: ...


def bare(error: TwostrokeError) -> TwostrokeError:
    """The same error without traceback and cause: their frames keep tensors and sockets alive."""
    return error_from_code(error.code, error.message, param=error.param)
