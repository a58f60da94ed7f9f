"""The owner's side of transfers: offers leases, checks references, sends blocks.

Called from several threads: the step thread offers and polls, RPC threads connect, pull, renew and
release. One lock guards leases and channels and is held for moments only: bytes move outside it, so
that no renewal waits for a transfer. `pull` alone blocks.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from core.config import TransferConfig
from core.errors import HandshakeRefusedError, TransferError
from core.kv import BlockRef, ChannelOffer, KVHandle, KVLayout, PullRequest
from core.prefix import BlockHash
from core.request import GenerateRequest
from kv_transfer.lease import EndedLease, LeaseTable
from kv_transfer.pack import StagingBuffer, digest, gather_blocks, reorder
from kv_transfer.plan import check_compatible, plan_messages
from kv_transfer.transport import Transport, TransportFactory, bare

logger = logging.getLogger(__name__)

MAX_JOINING = 32
"""Channels being set up at a time; each costs a thread until its other end comes."""
CHANNEL_IDLE_S = 90.0
"""A channel unused for this long is closed: its reader, if alive, has let go of it before that."""


@dataclass(slots=True)
class _Channel:
    """`transport` arrives when both ends have met. The staging buffer goes with the channel, so
    that nothing a broken one still reads is written by its heir."""

    staging: StagingBuffer
    inner_order: str
    """Of the messages: what the receiver asked for."""
    max_message_bytes: int
    last_used: float
    last_transfer_id: int = 0
    busy: bool = False
    transport: Future[Transport] = field(default_factory=Future)

    def close(self) -> None:
        """Closes the transport now, or as soon as the join that makes it ends: a transfer in
        progress fails."""
        self.transport.add_done_callback(_close_result)


def _close_result(future: Future[Transport]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


class KVSender:
    def __init__(
        self,
        kv: Tensor,
        *,
        layout: KVLayout,
        incarnation: str,
        worker: str,
        address: str,
        host: str,
        config: TransferConfig,
        transports: TransportFactory,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._layout = layout
        self._incarnation = incarnation
        self._worker = worker
        self._address = address
        self._host = host
        self._config = config
        self._transports = transports
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
            layout=self._layout,
            blocks=tuple(blocks),
            block_hashes=tuple(block_hashes),
            num_tokens=num_tokens,
            lease_s=self._config.lease_s,
        )
        with self._lock:
            self._leases.offer(handle, self._clock())
        return handle

    def connect(self, offer: ChannelOffer) -> None:
        """Check the receiver's offer and join its channel in the background. Does not block.

        Raises HandshakeRefusedError with the reason. A receiver's older channels are closed: it
        has one at a time, and may have given up on them unknown to us.
        """
        reason = self._refusal(offer)
        if reason is not None:
            raise HandshakeRefusedError(reason)
        channel = _Channel(
            staging=StagingBuffer(self._kv),
            inner_order=offer.layout.inner_order,
            max_message_bytes=offer.max_message_bytes,
            last_used=self._clock(),
        )
        receiver = offer.channel_id.partition(".")[0]
        with self._lock:
            num_joining = sum(not other.transport.done() for other in self._channels.values())
            if num_joining >= MAX_JOINING:
                raise TransferError("too many KV channels are being set up")
            old = [name for name in self._channels if name.partition(".")[0] == receiver]
            closing = [self._channels.pop(name) for name in old]
            self._channels[offer.channel_id] = channel
        threading.Thread(
            target=self._join, args=(offer, channel, closing), name="kv-join", daemon=True
        ).start()

    def _refusal(self, offer: ChannelOffer) -> str | None:
        if offer.incarnation != self._incarnation:
            return "the worker has been restarted since the handle was made"
        if offer.backend != self._transports.backend:
            return f"transport {offer.backend} there, {self._transports.backend} here"
        return check_compatible(self._layout, offer.layout)

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
        self._drop_channel(offer.channel_id)

    def pull(self, pull: PullRequest) -> tuple[bytes, ...]:
        """Send the blocks; returns the digest of each message, or () with checksums off.

        Blocks until the bytes are handed over, at most config.timeout_s. Raises StaleHandleError
        when the reference is refused, TransferError when sending fails. After either, the channel
        is closed, so that the receive which is already posted at the other end fails at once and
        not by its deadline.
        """
        deadline = self._clock() + self._config.timeout_s
        try:
            channel = self._begin(pull)
            try:
                return self._send(pull, channel, deadline)
            finally:
                self._finish(pull, channel)
        except BaseException:
            self._drop_channel(pull.channel_id)
            raise

    def _begin(self, pull: PullRequest) -> _Channel:
        with self._lock:
            channel = self._channels.get(pull.channel_id)
            if channel is None:
                raise TransferError("the KV channel is unknown or was closed")
            if pull.transfer_id <= channel.last_transfer_id:
                raise TransferError("this transfer has been asked for before")
            if channel.busy:
                raise TransferError("the KV channel has a transfer in progress")
            self._leases.begin(pull, self._clock())
            channel.busy = True
            channel.last_transfer_id = pull.transfer_id
            channel.last_used = self._clock()
            return channel

    def _finish(self, pull: PullRequest, channel: _Channel) -> None:
        with self._lock:
            self._leases.finish(pull.handle_id)
            channel.busy = False
            channel.last_used = self._clock()

    def _send(self, pull: PullRequest, channel: _Channel, deadline: float) -> tuple[bytes, ...]:
        try:
            transport = channel.transport.result(max(0.0, deadline - self._clock()))
        except TimeoutError:
            raise TransferError("the KV channel's other end did not come") from None
        sums: list[bytes] = []
        block_ids = [block.block_id for block in pull.blocks]
        for part in plan_messages(
            len(block_ids), self._layout.bytes_per_block, channel.max_message_bytes
        ):
            message = channel.staging.message(len(part))
            gather_blocks(self._kv, block_ids[part.start : part.stop], message)
            reorder(message, self._layout.inner_order, channel.inner_order)
            if self._config.verify_checksum:
                sums.append(digest(message))
            transport.send(message, deadline - self._clock())
        return tuple(sums)

    def _drop_channel(self, channel_id: str) -> None:
        with self._lock:
            channel = self._channels.pop(channel_id, None)
        if channel is not None:
            channel.close()

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
            closing = [self._channels.pop(name) for name in idle]
            ended = self._leases.drain_ended()
        for channel in closing:
            channel.close()
        return ended

    @property
    def num_leases(self) -> int:
        with self._lock:
            return len(self._leases)

    def close(self) -> None:
        """Close all channels; pulls in progress fail."""
        with self._lock:
            closing = list(self._channels.values())
            self._channels.clear()
        for channel in closing:
            channel.close()
