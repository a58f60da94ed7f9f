"""One rank's way to the blocks of one owner: a channel to each of the owner's ranks that holds some
of its layers and heads, and the bytes that come over them.

Knows no lease and no other rank of its own worker: every rank pulls its pieces by itself, and
kv_transfer/receiver.py sees to all of them being there.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from core.config import TransferConfig
from core.errors import TransferError
from core.kv import ChannelOffer, KVHandle, KVLayout, PullRequest
from kv_transfer.pack import StagingBuffer, digest, scatter
from kv_transfer.plan import Piece, plan_messages, plan_pieces
from kv_transfer.transport import Transport, TransportFactory

IDLE_S = 60.0
"""A channel unused for this long is not used again: the owner may be closing it."""
SETUP_S = 10.0
"""How long the owner may take to join a channel once it has said that it will."""
REFUSAL_GRACE_S = 2.0
"""When the channel breaks, how long to wait for the owner's own word on why."""


class KVOwner(Protocol):
    """Calls to whoever owns the blocks. Synchronous and thread-safe; raises TwostrokeError only."""

    def connect(self, offer: ChannelOffer, timeout_s: float) -> None: ...

    def pull(self, pull: PullRequest) -> tuple[bytes, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a handle covers from `first_position` on, and the blocks of this worker (the same on all
    its ranks) that it goes into: the first begins there."""

    handle: KVHandle
    first_position: int
    block_ids: tuple[int, ...]

    @property
    def positions(self) -> range:
        """Counted from the first of `block_ids`."""
        return range(self.handle.num_tokens - self.first_position)


class ReceivingRank:
    """One rank of a worker that pulls: its KV, and all that its channels need."""

    def __init__(
        self,
        kv: Tensor,
        *,
        layouts: Sequence[KVLayout],
        index: int = 0,
        config: TransferConfig,
        host: str,
        transports: TransportFactory,
        clock: Callable[[], float],
    ) -> None:
        """`layouts`: of all ranks of this worker, for they share the owner's copies of a head."""
        self.kv = kv
        self.layouts = tuple(layouts)
        self.index = index
        self.layout = self.layouts[index]
        self.config = config
        self.host = host
        self.transports = transports
        self.clock = clock
        self.uid = secrets.token_hex(8)
        """Names this rank in channel ids, so that an owner finds channels it has replaced."""
        self._channel_numbers = itertools.count(1)

    def new_channel_id(self, source: int) -> str:
        return f"{self.uid}.{source}.{next(self._channel_numbers)}"

    def pieces(self, handle: KVHandle) -> list[Piece]:
        """Of this rank. Raises HandshakeRefusedError."""
        pieces = plan_pieces(handle.layouts, self.layouts)
        return [piece for piece in pieces if piece.target == self.index]


class OwnerLink:
    """To one incarnation of one owner. One pull at a time; `close` from any thread."""

    def __init__(self, rank: ReceivingRank, owner: KVOwner, incarnation: str) -> None:
        self._rank = rank
        self._owner = owner
        self._incarnation = incarnation
        self._pulling = threading.Lock()
        self._state = threading.Lock()
        self._num_drops = 0
        self._closed = False
        self._channels: dict[int, _Channel] = {}
        """By the owner's rank."""

    def pull(self, wanted: Wanted, deadline: float) -> None:
        """Returns when all has arrived and is verified. Raises TwostrokeError; then nothing more
        will be written into the blocks, and the channels are gone."""
        with self._pulling:  # two would share channels, and so each other's messages
            try:
                self._pull(wanted, deadline)
            except BaseException:
                self.drop()
                raise

    def _pull(self, wanted: Wanted, deadline: float) -> None:
        num_drops = self._num_drops
        incoming = []
        for piece in self._rank.pieces(wanted.handle):
            channel = self._open_channel(piece, num_drops, deadline)
            incoming.append(_Incoming(self._rank, channel, wanted))
        for each in incoming:
            each.start(self._owner)
        # One message of each in turn: a sender must not wait long for its next receive.
        for _ in range(max(each.num_messages for each in incoming)):
            for each in incoming:
                each.receive_next(deadline)
        for each in incoming:
            each.verify(deadline)

    def drop(self) -> None:
        """Close all channels: pending messages fail at once, and so does a pull that is still
        opening some."""
        with self._state:
            self._num_drops += 1
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def close(self) -> None:
        """No pull succeeds any more."""
        with self._state:
            self._closed = True
        self.drop()

    def _open_channel(self, piece: Piece, num_drops: int, deadline: float) -> _Channel:
        """The channel in use, unless the owner may have closed it as idle or its messages are of
        another layout (handles of an owner all have one, unless one lies), or a new one."""
        now, channel = self._rank.clock(), self._channels.get(piece.source)
        if channel is None or now - channel.last_used > IDLE_S or channel.layout != piece.layout:
            channel = self._new_channel(piece, deadline)
        channel.last_used = now
        with self._state:
            replaced = self._channels.get(piece.source)
            is_wanted = self._num_drops == num_drops and not self._closed
            if is_wanted:
                self._channels[piece.source] = channel
        if not is_wanted:
            channel.close()
            raise TransferError("the KV link was closed")
        if replaced is not None and replaced is not channel:
            replaced.close()
        return channel

    def _new_channel(self, piece: Piece, deadline: float) -> _Channel:
        """Offer, let the owner check and join, meet it. Raises HandshakeRefusedError."""
        rank = self._rank
        left = deadline - rank.clock()
        if left <= 0:
            raise TransferError("the KV transfer's time ran out")
        channel_id = rank.new_channel_id(piece.source)
        listener = rank.transports.listen(channel_id, rank.host)
        offer = ChannelOffer(
            channel_id=channel_id,
            source=piece.source,
            backend=rank.transports.backend,
            store_host=listener.meeting.host,
            store_port=listener.meeting.port,
            layout=piece.layout,
            incarnation=self._incarnation,
            max_message_bytes=rank.config.max_message_bytes,
        )
        try:
            self._owner.connect(offer, min(rank.config.timeout_s, left))
            transport = listener.accept(min(SETUP_S, deadline - rank.clock()))
        finally:
            listener.close()
        return _Channel(channel_id, transport, piece.layout, rank.kv.device)


class _Channel:
    """Our end of a channel, with all that must not outlive it: its staging memory, which a late
    message could still write, and the thread that waits for the owner's reply."""

    def __init__(
        self, channel_id: str, transport: Transport, layout: KVLayout, device: torch.device
    ) -> None:
        self.channel_id = channel_id
        self.transport = transport
        self.layout = layout
        """Of the messages."""
        self.staging = (StagingBuffer(layout, device), StagingBuffer(layout, device))
        self.last_used = 0.0
        self.is_closed = False
        self._num_transfers = 0
        self._calls = ThreadPoolExecutor(1, "kv-pull")

    def ask(self, owner: KVOwner, wanted: Wanted) -> Future[tuple[bytes, ...]]:
        """Tell the owner to send. A refusal breaks the channel: nothing will come."""
        self._num_transfers += 1
        handle = wanted.handle
        pull = PullRequest(
            handle_id=handle.handle_id,
            request_id=handle.request_id,
            attempt=handle.attempt,
            incarnation=handle.incarnation,
            channel_id=self.channel_id,
            transfer_id=self._num_transfers,
            first_position=wanted.first_position,
            blocks=handle.blocks[wanted.first_position // handle.block_size :],
            block_hashes=handle.block_hashes,
        )
        reply = self._calls.submit(owner.pull, pull)
        reply.add_done_callback(self._close_if_failed)
        return reply

    def _close_if_failed(self, reply: Future[tuple[bytes, ...]]) -> None:
        if reply.exception() is not None:
            self.transport.close()

    def close(self) -> None:
        self.is_closed = True
        self.transport.close()
        self._calls.shutdown(wait=False)


class _Incoming:
    """The messages of one piece of a pull: while one is scattered, the next is already received."""

    def __init__(self, rank: ReceivingRank, channel: _Channel, wanted: Wanted) -> None:
        self._rank = rank
        self._channel = channel
        self._wanted = wanted
        self._parts = plan_messages(wanted.positions, channel.layout, rank.config.max_message_bytes)
        self._num_received = 0
        self._sums: list[bytes] = []

    @property
    def num_messages(self) -> int:
        return len(self._parts)

    def start(self, owner: KVOwner) -> None:
        """The first receive is posted before the owner is told: NCCL's rule."""
        self._post(0)
        self._reply = self._channel.ask(owner, self._wanted)

    def receive_next(self, deadline: float) -> None:
        """Take one message into the destination blocks, if there is one to come. The blocks are
        nobody's but this pull's until its checksums are compared, so writing them early is safe."""
        if self._num_received == len(self._parts):
            return
        rank, layout, index = self._rank, self._channel.layout, self._num_received
        with self._owners_reason(deadline):
            self._pending.wait(deadline - rank.clock())
            message = self._message
            self._post(index + 1)
        if rank.config.verify_checksum:
            self._sums.append(digest(message))
        scatter(message, layout, rank.kv, rank.layout, self._wanted.block_ids, self._parts[index])
        self._num_received += 1

    def verify(self, deadline: float) -> None:
        """The owner's word on all of it."""
        with self._owners_reason(deadline):
            expected = self._reply.result(max(0.0, deadline - self._rank.clock()))
        if self._rank.config.verify_checksum and not expected:
            raise TransferError("this worker compares checksums and the KV owner sends none")
        if self._rank.config.verify_checksum and tuple(self._sums) != expected:
            raise TransferError("the KV arrived with another checksum than it was sent with")

    @contextmanager
    def _owners_reason(self, deadline: float) -> Iterator[None]:
        """Of a refusal, which says more than the broken channel that it caused."""
        try:
            yield
        except TimeoutError:
            raise TransferError("the KV owner sent its blocks and no word") from None
        except TransferError:
            if not self._channel.is_closed:
                _raise_reason(self._reply, deadline - self._rank.clock())
            raise

    def _post(self, index: int) -> None:
        if index < len(self._parts):
            staging = self._channel.staging[index % 2]
            self._message = staging.message(self._parts[index])
            self._pending = self._channel.transport.post_recv(self._message)


def _raise_reason(reply: Future[tuple[bytes, ...]], timeout_s: float) -> None:
    try:
        reply.result(min(REFUSAL_GRACE_S, max(0.0, timeout_s)))
    except TimeoutError:
        return
