"""The owner's side of transfers: offers leases, checks references, has its ranks send blocks.

Called from several threads: the step thread offers and polls, RPC threads connect, pull, renew and
release. One lock guards leases and channels and is held for moments only: bytes move outside it, so
that no renewal waits for a transfer. `pull` alone blocks.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.config import TransferConfig
from core.errors import HandshakeRefusedError, TransferError
from core.kv import BlockRef, ChannelOffer, KVHandle, KVLayout, PullRequest
from core.prefix import BlockHash
from core.request import GenerateRequest
from kv_transfer.lease import EndedLease, LeaseTable
from kv_transfer.plan import check_messages
from kv_transfer.rank_sender import SendingRank

CHANNEL_IDLE_S = 90.0
"""A channel unused for this long is closed: its reader, if alive, has let go of it before that."""


@dataclass(slots=True)
class _Channel:
    """Between one rank of a reader and one of ours."""

    rank: SendingRank
    reader: str
    """Which two: there is one channel for them at a time."""
    unit: int
    """Positions of one block of the messages."""
    last_used: float
    last_transfer_id: int = 0
    busy: bool = False


class _Task(NamedTuple):
    channel: _Channel
    positions: range
    """Counted from the pull's first block."""


class KVSender:
    def __init__(
        self,
        ranks: Sequence[SendingRank],
        *,
        layouts: Sequence[KVLayout],
        incarnation: str,
        worker: str,
        address: str,
        config: TransferConfig,
        backend: str,
        clock: Callable[[], float],
    ) -> None:
        """`ranks` of this worker and their layouts, in order; `backend` of their transports."""
        self._ranks = tuple(ranks)
        self._layouts = tuple(layouts)
        self._incarnation = incarnation
        self._worker = worker
        self._address = address
        self._config = config
        self._backend = backend
        self._clock = clock
        self._lock = threading.Lock()
        self._leases = LeaseTable(incarnation, config.lease_s)
        self._channels: dict[str, _Channel] = {}

    @property
    def refusals(self) -> dict[str, int]:
        """Refused pulls by reason."""
        with self._lock:
            return dict(self._leases.refusals)

    def offer(
        self,
        request: GenerateRequest,
        *,
        blocks: Sequence[BlockRef],
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
    ) -> KVHandle:
        """Promise `blocks`, with KV of positions [0, num_tokens), to whoever gets the handle."""
        handle = KVHandle(
            handle_id=secrets.token_hex(16),
            request_id=request.request_id,
            attempt=request.attempt,
            worker=self._worker,
            incarnation=self._incarnation,
            address=self._address,
            layouts=self._layouts,
            blocks=tuple(blocks),
            block_hashes=tuple(block_hashes),
            num_tokens=num_tokens,
            lease_s=self._config.lease_s,
        )
        with self._lock:
            self._leases.offer(handle, self._clock())
        return handle

    def connect(self, offer: ChannelOffer) -> None:
        """Check a reader's offer and have the rank join the channel, in the background.

        Raises HandshakeRefusedError with the reason. An older channel of the same two ranks is
        closed: the reader may have given up on it unknown to us.
        """
        reason = self._refusal(offer)
        if reason is not None:
            raise HandshakeRefusedError(reason)
        channel = _Channel(
            rank=self._ranks[offer.source],
            reader=f"{offer.channel_id.partition('.')[0]}.{offer.source}",
            unit=offer.layout.block_size,
            last_used=self._clock(),
        )
        with self._lock:
            old = [name for name, c in self._channels.items() if c.reader == channel.reader]
            for name in old:
                del self._channels[name]
            self._channels[offer.channel_id] = channel
        try:
            channel.rank.connect(offer, old)
        except BaseException:
            self._drop_channel(offer.channel_id)
            for name in old:
                channel.rank.drop(name)
            raise

    def _refusal(self, offer: ChannelOffer) -> str | None:
        if offer.incarnation != self._incarnation:
            return "the worker has been restarted since the handle was made"
        if offer.backend != self._backend:
            return f"transport {offer.backend} there, {self._backend} here"
        if not 0 <= offer.source < len(self._ranks):
            return f"rank {offer.source} is asked for, the worker has {len(self._ranks)}"
        return check_messages(self._layouts[offer.source], offer.layout)

    def pull(self, pull: PullRequest) -> tuple[bytes, ...]:
        """Send the blocks; returns the digest of each message, or () with checksums off.

        Blocks until the bytes are handed over, at most config.timeout_s. Raises StaleHandleError
        when the reference is refused, TransferError when sending fails. After either, the channel
        is closed, so that the receive which is already posted at the other end fails at once and
        not by its deadline.
        """
        try:
            channel, positions = self._begin(pull)
            try:
                block_ids = [block.block_id for block in pull.blocks]
                return channel.rank.send(pull.channel_id, block_ids, positions)
            finally:
                self._finish(pull, channel)
        except BaseException:
            self._drop_channel(pull.channel_id)
            raise

    def _begin(self, pull: PullRequest) -> _Task:
        with self._lock:
            channel = self._channels.get(pull.channel_id)
            if channel is None:
                raise TransferError("the KV channel is unknown or was closed")
            if pull.transfer_id <= channel.last_transfer_id:
                raise TransferError("this transfer has been asked for before")
            if channel.busy:
                raise TransferError("the KV channel has a transfer in progress")
            if pull.first_position % channel.unit:
                raise TransferError(
                    f"position {pull.first_position} is none where a message could begin"
                )
            handle = self._leases.begin(pull, self._clock())
            channel.busy = True
            channel.last_transfer_id = pull.transfer_id
            channel.last_used = self._clock()
        before = pull.first_position // handle.block_size * handle.block_size
        return _Task(channel, range(pull.first_position - before, handle.num_tokens - before))

    def _finish(self, pull: PullRequest, channel: _Channel) -> None:
        with self._lock:
            self._leases.finish(pull.handle_id)
            channel.busy = False
            channel.last_used = self._clock()

    def _drop_channel(self, channel_id: str) -> None:
        with self._lock:
            channel = self._channels.pop(channel_id, None)
        if channel is not None:
            channel.rank.drop(channel_id)

    def renew(self, handle_ids: Sequence[str]) -> tuple[str, ...]:
        """Returns the handles whose leases are over."""
        with self._lock:
            return self._leases.renew(handle_ids, self._clock())

    def release(self, handle_id: str, reason: str = "released") -> None:
        with self._lock:
            self._leases.release(handle_id, reason)

    def abort_request(self, request_id: str, attempt: int) -> None:
        """End the request's lease; one that a transfer reads just now ends with the transfer."""
        with self._lock:
            self._leases.release_request(request_id, attempt, "aborted")

    def poll(self, now: float) -> list[EndedLease]:
        """Leases that ended since the last call: the step thread gives their blocks back."""
        with self._lock:
            self._leases.expire(now)
            idle = [
                name
                for name, channel in self._channels.items()
                if now - channel.last_used > CHANNEL_IDLE_S and not channel.busy
            ]
            ended = self._leases.drain_ended()
        for name in idle:
            self._drop_channel(name)
        return ended

    @property
    def num_leases(self) -> int:
        with self._lock:
            return len(self._leases)

    def close(self) -> None:
        """Close all channels; pulls in progress fail."""
        with self._lock:
            self._channels.clear()
        for rank in self._ranks:
            rank.close()
