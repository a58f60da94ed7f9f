"""The reader's side of transfers: keeps leases alive, pulls blocks, says when they are complete.

One peer object per (owner address, incarnation), with two threads: one moves bytes, one job after
the other; one sends the small words (renew, release), so that a long transfer delays no lease.
The step thread only hands in and collects; no call of it waits for the network.

Locks are taken in this order: the receiver's, then a peer's.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.config import TransferConfig
from core.errors import AbortedError, TransferError, TwostrokeError
from core.kv import ChannelOffer, KVHandle, KVLayout, PullRequest
from kv_transfer.pack import StagingBuffer, digest, reorder, scatter_blocks
from kv_transfer.plan import message_layout, plan_messages
from kv_transfer.transport import Transport, TransportFactory, bare

logger = logging.getLogger(__name__)

MAX_PEERS = 128
"""Owners dealt with at a time: each costs two threads and a few sockets."""
IDLE_S = 60.0
"""A peer without jobs and leases for this long is dropped, with its threads and its channel."""
MIN_RENEWAL_S = 0.02
"""Between two renewals, whatever a handle says of its lease."""
SETUP_S = 10.0
"""How long the owner may take to join a channel once it has said that it will."""
REFUSAL_GRACE_S = 2.0
"""When the channel breaks, how long to wait for the owner's own word on why."""


class PeerClient(Protocol):
    """Calls to the owner of blocks. Synchronous and thread-safe; raises TwostrokeError only."""

    def connect(self, offer: ChannelOffer) -> None: ...

    def pull(self, pull: PullRequest) -> tuple[bytes, ...]: ...

    def renew(self, handle_ids: Sequence[str]) -> tuple[str, ...]: ...

    def release(self, handle_ids: Sequence[str], reason: str) -> None: ...

    def close(self) -> None: ...


PeerConnector = Callable[[str], PeerClient]
"""Address -> client. Must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullDone:
    """Comes exactly once per `start`. Only now may the destination blocks be given to others."""

    handle_id: str
    request_id: str
    attempt: int
    error: TwostrokeError | None
    num_blocks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    handle: KVHandle
    first_block: int
    block_ids: tuple[int, ...]
    bytes_per_block: int
    """Of the receiver's own layout: what a handle says is not to be trusted."""

    @property
    def key(self) -> tuple[str, int]:
        return self.handle.request_id, self.handle.attempt

    def done(self, error: TwostrokeError | None, seconds: float) -> PullDone:
        num_blocks = len(self.block_ids) if error is None else 0
        return PullDone(
            handle_id=self.handle.handle_id,
            request_id=self.handle.request_id,
            attempt=self.handle.attempt,
            error=error,
            num_blocks=num_blocks,
            num_bytes=num_blocks * self.bytes_per_block,
            seconds=seconds,
        )


class KVReceiver:
    def __init__(
        self,
        kv: Tensor,
        *,
        layout: KVLayout,
        config: TransferConfig,
        host: str,
        transports: TransportFactory,
        peers: PeerConnector,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.kv = kv
        self.layout = layout
        self.config = config
        self.host = host
        self.transports = transports
        self.clock = clock
        self.uid = secrets.token_hex(8)
        """Names this receiver in channel ids, so that an owner finds channels it has replaced."""
        self.wake = wake
        """Called from a transfer thread when `poll` has something."""
        self._connect = peers
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._closed = False
        self._done: deque[PullDone] = deque()

    def hold(self, handle: KVHandle) -> None:
        """Keep the handle's lease alive from now on."""
        with self._lock:
            if (peer := self._peer(handle)) is not None:
                peer.hold(handle.handle_id)

    def release(self, handle: KVHandle, reason: str) -> None:
        """Tell the owner that nobody will pull this handle. Returns at once."""
        with self._lock:
            if (peer := self._peer(handle)) is not None:
                peer.release(handle.handle_id, reason)

    def start(self, handle: KVHandle, first_block: int, block_ids: Sequence[int]) -> None:
        """Pull handle.blocks[first_block:] into `block_ids`; nothing left to pull only releases."""
        assert first_block + len(block_ids) == len(handle.blocks), (first_block, len(block_ids))
        job = _Job(
            handle=handle,
            first_block=first_block,
            block_ids=tuple(block_ids),
            bytes_per_block=self.layout.bytes_per_block,
        )
        with self._lock:
            if (peer := self._peer(handle)) is not None:
                peer.submit(job)
                return
        full = TransferError("too many KV owners are being dealt with")
        self.finished(job.done(_shutting_down() if self._closed else full, 0.0))

    def cancel(self, request_id: str, attempt: int) -> None:
        """A pull that has not begun ends now with AbortedError; a running one runs to its end."""
        with self._lock:
            for peer in self._peers.values():
                peer.cancel(request_id, attempt)

    def poll(self) -> list[PullDone]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def finished(self, done: PullDone) -> None:
        """For the peers' threads."""
        self._done.append(done)
        self.wake()

    def _peer(self, handle: KVHandle) -> _Peer | None:
        """None when closed or full. The caller keeps the lock until it has handed in what it came
        for, so that the peer cannot retire in between."""
        if self._closed:
            return None
        key = (handle.address, handle.incarnation)
        if key not in self._peers:
            if len(self._peers) >= MAX_PEERS:
                logger.error("%d owners of KV are known; not dialling another", MAX_PEERS)
                return None
            self._peers[key] = _Peer(self, self._connect(handle.address), handle)
        return self._peers[key]

    def retire(self, peer: _Peer) -> None:
        """An idle peer asks to leave."""
        with self._lock:
            if peer.retire():
                self._peers = {k: other for k, other in self._peers.items() if other is not peer}

    def close(self) -> None:
        """End all threads and transfers; what was queued or running ends with AbortedError."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        for peer in peers:
            peer.join()


def _shutting_down() -> AbortedError:
    return AbortedError("the worker is shutting down")


class _Peer:
    """One owner of blocks, as this process sees it."""

    def __init__(self, receiver: KVReceiver, client: PeerClient, handle: KVHandle) -> None:
        self._receiver = receiver
        self._client = client
        self._incarnation = handle.incarnation
        self._layout = message_layout(handle.layout, receiver.layout)
        """Of the messages. The owner has it from our offers: a wrong handle costs time, no more."""
        self._renewal_s = max(MIN_RENEWAL_S, min(receiver.config.lease_s, handle.lease_s) / 3)
        self._state = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._held: set[str] = set()
        self._released: dict[str, str] = {}
        """handle_id -> reason, to be told to the owner."""
        self._busy = False
        self._closed = False
        """No job comes any more."""
        self._drained = False
        """No job runs any more, so no release comes either."""
        self._channel: _Channel | None = None
        self._num_channels = 0
        self._threads = [
            threading.Thread(target=self._move, name="kv-receive", daemon=True),
            threading.Thread(target=self._speak, name="kv-lease", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # Called by the step thread.

    def hold(self, handle_id: str) -> None:
        with self._state:
            self._held.add(handle_id)

    def release(self, handle_id: str, reason: str) -> None:
        with self._state:
            self._held.discard(handle_id)
            self._released[handle_id] = reason
            self._state.notify_all()

    def submit(self, job: _Job) -> None:
        with self._state:
            self._held.add(job.handle.handle_id)
            self._jobs.append(job)
            self._state.notify_all()

    def cancel(self, request_id: str, attempt: int) -> None:
        with self._state:
            dropped = [job for job in self._jobs if job.key == (request_id, attempt)]
            self._jobs = deque(job for job in self._jobs if job.key != (request_id, attempt))
            for job in dropped:
                self._finish(job, AbortedError("aborted before its KV was pulled"), 0.0)

    def retire(self) -> bool:
        """True when it has ended, which it does when nothing and nobody needs it."""
        with self._state:
            needed = self._jobs or self._held or self._released or self._busy
            self._closed = self._closed or not needed  # `close` is never undone
            return self._closed

    def close(self) -> None:
        """Begin to end: queued jobs end now, the running one as soon as its channel has broken."""
        with self._state:
            self._closed = True
            dropped, self._jobs = list(self._jobs), deque()
            for job in dropped:
                self._finish(job, _shutting_down(), 0.0)
            channel = self._channel
            self._state.notify_all()
        if channel is not None:
            channel.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(self._receiver.config.timeout_s)

    # The thread that speaks: leases and releases.

    def _speak(self) -> None:
        """Outlives the other thread, to tell the owner about the last job."""
        clock = self._receiver.clock
        next_renewal = clock() + self._renewal_s
        ended = False
        while not ended:
            with self._state:
                self._state.wait_for(
                    lambda: self._released or self._drained, max(0.0, next_renewal - clock())
                )
                released, self._released = self._released, {}
                held, ended = tuple(self._held), self._drained
            self._tell_released(released)
            if clock() >= next_renewal:
                self._renew(held)
                next_renewal = clock() + self._renewal_s
        self._client.close()

    def _tell_released(self, released: dict[str, str]) -> None:
        for reason in set(released.values()):
            handle_ids = [handle_id for handle_id, why in released.items() if why == reason]
            try:
                self._client.release(handle_ids, reason)
            except TwostrokeError as error:  # its lease ends by itself
                logger.warning("could not release %d handles: %s", len(handle_ids), error)

    def _renew(self, held: tuple[str, ...]) -> None:
        if not held:
            return
        try:
            unknown = self._client.renew(held)
        except TwostrokeError as error:  # the pull itself will fail with the reason
            logger.warning("could not renew %d leases: %s", len(held), error)
            return
        with self._state:
            over = self._held.intersection(unknown)
            self._held -= over
        if over:
            logger.warning("%d leases had ended before their pull", len(over))

    # The thread that moves bytes.

    def _move(self) -> None:
        clock = self._receiver.clock
        while (job := self._next_job()) is not None:
            started = clock()
            error = self._attempt(job, started + self._receiver.config.timeout_s)
            if error is not None:
                self._drop_channel()
            seconds = clock() - started
            self._finish(job, error, seconds)
            if error is not None and seconds >= self._receiver.config.timeout_s:
                self._fail_queued(error)
        self._drop_channel()
        with self._state:
            self._drained = True
            self._state.notify_all()

    def _fail_queued(self, error: TwostrokeError) -> None:
        """The owner let a whole timeout pass. What waited behind it is better off elsewhere than
        waiting for as many timeouts."""
        with self._state:
            dropped, self._jobs = list(self._jobs), deque()
        for job in dropped:
            self._finish(job, type(error)(error.message), 0.0)

    def _next_job(self) -> _Job | None:
        """The next job, or None when the peer has ended."""
        while True:
            with self._state:
                self._busy = False
                self._state.wait_for(lambda: self._jobs or self._closed, IDLE_S)
                if self._jobs:
                    self._busy = True
                    return self._jobs.popleft()
                if self._closed:
                    return None
            self._receiver.retire(self)

    def _finish(self, job: _Job, error: TwostrokeError | None, seconds: float) -> None:
        self.release(job.handle.handle_id, "received" if error is None else error.code)
        self._receiver.finished(job.done(error, seconds))

    def _attempt(self, job: _Job, deadline: float) -> TwostrokeError | None:
        """Why the job failed."""
        try:
            if job.block_ids:
                self._transfer(job, self._open_channel(deadline), deadline)
        except Exception as error:
            if self._closed:
                return _shutting_down()
            if isinstance(error, TwostrokeError):
                return bare(error)
            logger.exception("a KV transfer failed")
            return TransferError(f"the KV transfer failed: {type(error).__name__}")
        return None

    def _transfer(self, job: _Job, channel: _Channel, deadline: float) -> None:
        receiver = self._receiver
        incoming = _Incoming(receiver, channel, job)
        incoming.post(0)  # before the owner is told: NCCL's rule
        reply = channel.ask(self._client, job)
        try:
            sums = incoming.receive(deadline)
            expected = reply.result(max(0.0, deadline - receiver.clock()))
        except TimeoutError:
            raise TransferError("the KV owner sent its blocks and no word") from None
        except TransferError:
            if not self._closed:
                _raise_owners_reason(reply, deadline - receiver.clock())
            raise
        if receiver.config.verify_checksum and not expected:
            raise TransferError("this worker compares checksums and the KV owner sends none")
        if receiver.config.verify_checksum and sums != expected:
            raise TransferError("the KV arrived with another checksum than it was sent with")

    def _open_channel(self, deadline: float) -> _Channel:
        """The channel in use, unless the owner may have closed it as idle, or a new one."""
        now = self._receiver.clock()
        if self._channel is not None and now - self._channel.last_used > IDLE_S:
            self._drop_channel()
        channel = self._channel or self._new_channel(deadline)
        channel.last_used = now
        with self._state:
            self._channel = channel
            if self._closed:
                raise _shutting_down()
        return channel

    def _new_channel(self, deadline: float) -> _Channel:
        """Offer, let the owner check and join, meet it. Raises HandshakeRefusedError."""
        receiver = self._receiver
        self._num_channels += 1
        channel_id = f"{receiver.uid}.{id(self):x}.{self._num_channels}"
        listener = receiver.transports.listen(channel_id, receiver.host)
        offer = ChannelOffer(
            channel_id=channel_id,
            backend=receiver.transports.backend,
            store_host=listener.meeting.host,
            store_port=listener.meeting.port,
            layout=self._layout,
            incarnation=self._incarnation,
            max_message_bytes=receiver.config.max_message_bytes,
        )
        try:
            self._client.connect(offer)
            transport = listener.accept(min(SETUP_S, deadline - receiver.clock()))
        finally:
            listener.close()
        return _Channel(channel_id, transport, receiver.kv, self._layout.inner_order)

    def _drop_channel(self) -> None:
        with self._state:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _raise_owners_reason(reply: Future[tuple[bytes, ...]], timeout_s: float) -> None:
    """The owner's refusal says more than the broken channel it caused."""
    try:
        reply.result(min(REFUSAL_GRACE_S, max(0.0, timeout_s)))
    except TimeoutError:
        return


class _Channel:
    """Our end of a channel, with all that must not outlive it: its staging memory, which a late
    message could still write, and the thread that waits for the owner's reply."""

    def __init__(self, channel_id: str, transport: Transport, kv: Tensor, inner_order: str) -> None:
        self.channel_id = channel_id
        self.transport = transport
        self.inner_order = inner_order
        """Of the messages."""
        self.staging = (StagingBuffer(kv), StagingBuffer(kv))
        self.last_used = 0.0
        self._num_transfers = 0
        self._calls = ThreadPoolExecutor(1, "kv-pull")

    def ask(self, client: PeerClient, job: _Job) -> Future[tuple[bytes, ...]]:
        """Tell the owner to send. A refusal breaks the channel: nothing will come."""
        self._num_transfers += 1
        pull = PullRequest(
            handle_id=job.handle.handle_id,
            request_id=job.handle.request_id,
            attempt=job.handle.attempt,
            incarnation=job.handle.incarnation,
            channel_id=self.channel_id,
            transfer_id=self._num_transfers,
            first_block=job.first_block,
            blocks=job.handle.blocks[job.first_block :],
            block_hashes=job.handle.block_hashes,
        )
        reply = self._calls.submit(client.pull, pull)
        reply.add_done_callback(self._close_if_failed)
        return reply

    def _close_if_failed(self, reply: Future[tuple[bytes, ...]]) -> None:
        if reply.exception() is not None:
            self.transport.close()

    def close(self) -> None:
        self.transport.close()
        self._calls.shutdown(wait=False)


class _Incoming:
    """The messages of one pull: while one is scattered, the next is already being received."""

    def __init__(self, receiver: KVReceiver, channel: _Channel, job: _Job) -> None:
        self._receiver = receiver
        self._channel = channel
        self._block_ids = job.block_ids
        self._parts = plan_messages(
            len(job.block_ids), receiver.layout.bytes_per_block, receiver.config.max_message_bytes
        )

    def post(self, index: int) -> None:
        if index < len(self._parts):
            staging = self._channel.staging[index % 2]
            self._message = staging.message(len(self._parts[index]))
            self._pending = self._channel.transport.post_recv(self._message)

    def receive(self, deadline: float) -> tuple[bytes, ...]:
        """Take all messages into the destination blocks; returns their digests. The blocks are
        nobody's but this pull's until its checksums are compared, so writing them early is safe."""
        receiver, sums = self._receiver, []
        for index, part in enumerate(self._parts):
            self._pending.wait(deadline - receiver.clock())
            message = self._message
            self.post(index + 1)
            if receiver.config.verify_checksum:
                sums.append(digest(message))
            reorder(message, self._channel.inner_order, receiver.layout.inner_order)
            scatter_blocks(message, receiver.kv, self._block_ids[part.start : part.stop])
        return tuple(sums)
