"""One rank of an owner of blocks: its ends of channels, and the bytes that go out over them.

Knows no lease: kv_transfer/sender.py has checked what it is told to send.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from core.config import TransferConfig
from core.errors import TransferError
from core.kv import ChannelOffer, KVLayout
from kv_transfer.pack import StagingBuffer, digest, gather
from kv_transfer.plan import plan_messages
from kv_transfer.transport import Transport, TransportFactory, bare

logger = logging.getLogger(__name__)

MAX_JOINING = 32
"""Channels being set up at a time; each costs a thread until its other end comes."""


class SendingRank(Protocol):
    """What KVSender asks of each rank of its worker. Thread-safe; raises TransferError only."""

    def connect(self, offer: ChannelOffer, replaced: Sequence[str]) -> None:
        """Join the offered channel in the background, once those `replaced` are closed."""
        ...

    def send(
        self, channel_id: str, block_ids: Sequence[int], positions: range
    ) -> tuple[bytes, ...]:
        """Returns the digest of each message, or () with checksums off. `positions` are counted
        from the first of `block_ids`. Blocks until the bytes are handed over."""
        ...

    def drop(self, channel_id: str) -> None:
        """Close a channel: a transfer in progress fails. Returns at once; unknown ones are
        ignored."""
        ...

    def close(self) -> None:
        """No more calls; channels of a rank in this process close."""
        ...


@dataclass(slots=True)
class _Channel:
    """`transport` arrives when both ends have met. The staging buffer goes with the channel, so
    that nothing a broken one still reads is written by its heir."""

    staging: StagingBuffer
    layout: KVLayout
    """Of the messages: what the receiver asked for."""
    max_message_bytes: int
    transport: Future[Transport] = field(default_factory=Future)

    def close(self) -> None:
        """Closes the transport now, or as soon as the join that makes it ends."""
        self.transport.add_done_callback(_close_result)


def _close_result(future: Future[Transport]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


class RankSender:
    """A SendingRank in this process."""

    def __init__(
        self,
        kv: Tensor,
        *,
        layout: KVLayout,
        host: str,
        config: TransferConfig,
        transports: TransportFactory,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._layout = layout
        self._host = host
        self._config = config
        self._transports = transports
        self._clock = clock
        self._lock = threading.Lock()
        self._channels: dict[str, _Channel] = {}

    def connect(self, offer: ChannelOffer, replaced: Sequence[str]) -> None:
        channel = _Channel(
            staging=StagingBuffer(offer.layout, self._kv.device),
            layout=offer.layout,
            max_message_bytes=offer.max_message_bytes,
        )
        with self._lock:
            num_joining = sum(not other.transport.done() for other in self._channels.values())
            if num_joining >= MAX_JOINING:
                raise TransferError("too many KV channels are being set up")
            closing = [self._channels.pop(name) for name in replaced if name in self._channels]
            self._channels[offer.channel_id] = channel
        threading.Thread(
            target=self._join, args=(offer, channel, closing), name="kv-join", daemon=True
        ).start()

    def _join(self, offer: ChannelOffer, channel: _Channel, replaced: list[_Channel]) -> None:
        for old in replaced:
            old.close()
        try:
            transport = self._transports.join(offer, self._host, self._config.timeout_s)
        except TransferError as error:
            channel.transport.set_exception(bare(error))
        except Exception:
            logger.exception("joining a KV channel failed")
            channel.transport.set_exception(TransferError("the KV owner cannot join the channel"))
        else:
            channel.transport.set_result(transport)
            return
        self.drop(offer.channel_id)

    def send(
        self, channel_id: str, block_ids: Sequence[int], positions: range
    ) -> tuple[bytes, ...]:
        deadline = self._clock() + self._config.timeout_s
        with self._lock:
            channel = self._channels.get(channel_id)
        if channel is None:
            raise TransferError("the KV channel is unknown or was closed")
        try:
            transport = channel.transport.result(max(0.0, deadline - self._clock()))
        except TimeoutError:
            raise TransferError("the KV channel's other end did not come") from None
        sums: list[bytes] = []
        for part in plan_messages(positions, channel.layout, channel.max_message_bytes):
            message = channel.staging.message(part)
            gather(self._kv, self._layout, block_ids, part, message, channel.layout)
            if self._config.verify_checksum:
                sums.append(digest(message))
            transport.send(message, deadline - self._clock())
        return tuple(sums)

    def drop(self, channel_id: str) -> None:
        with self._lock:
            channel = self._channels.pop(channel_id, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        with self._lock:
            closing = list(self._channels.values())
            self._channels.clear()
        for channel in closing:
            channel.close()
