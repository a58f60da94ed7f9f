"""The reader's side of transfers: keeps leases alive, pulls blocks, says when they are complete.

One peer object per (owner address, incarnation), with two threads: one moves bytes, one job after
the other; one sends the small words (renew, release), so that a long transfer delays no lease.
The step thread only hands in and collects; no call of it waits for the network.
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
from kv_transfer.pack import StagingBuffer, digest, scatter_blocks
from kv_transfer.plan import plan_messages
from kv_transfer.transport import Transport, TransportFactory

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""A peer without jobs and leases for this long is dropped, with its threads and its channel."""
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

    @property
    def key(self) -> tuple[str, int]:
        return self.handle.request_id, self.handle.attempt


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
        self._done: deque[PullDone] = deque()

    def hold(self, handle: KVHandle) -> None:
        """Keep the handle's lease alive from now on."""
        self._peer(handle).hold(handle.handle_id)

    def release(self, handle: KVHandle, reason: str) -> None:
        """Tell the owner that nobody will pull this handle. Returns at once."""
        self._peer(handle).release(handle.handle_id, reason)

    def start(self, handle: KVHandle, first_block: int, block_ids: Sequence[int]) -> None:
        """Pull handle.blocks[first_block:] into `block_ids`; nothing left to pull only releases."""
        assert first_block + len(block_ids) == len(handle.blocks), (first_block, len(block_ids))
        job = _Job(handle=handle, first_block=first_block, block_ids=tuple(block_ids))
        self._peer(handle).submit(job)

    def cancel(self, request_id: str, attempt: int) -> None:
        """A pull that has not begun ends now with AbortedError; a running one runs to its end."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
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

    def _peer(self, handle: KVHandle) -> _Peer:
        key = (handle.address, handle.incarnation)
        with self._lock:
            peer = self._peers.get(key)
            if peer is None or peer.closed:
                client = self._connect(handle.address)
                peer = self._peers[key] = _Peer(self, client, handle.incarnation)
            return peer

    def forget(self, peer: _Peer) -> bool:
        """Called by an idle peer: True when it is out and must end."""
        with self._lock:
            if not peer.retire():
                return False
            self._peers = {key: other for key, other in self._peers.items() if other is not peer}
            return True

    def close(self) -> None:
        """End all threads; what is queued ends with AbortedError."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()


class _Peer:
    """One owner of blocks, as this process sees it."""

    def __init__(self, receiver: KVReceiver, client: PeerClient, incarnation: str) -> None:
        self._receiver = receiver
        self._client = client
        self._incarnation = incarnation
        self._state = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._held: set[str] = set()
        self._released: dict[str, str] = {}
        """handle_id -> reason, to be told to the owner."""
        self._busy = False
        self.closed = False
        self._channel: _Channel | None = None
        self._num_channels = 0
        self._staging = (StagingBuffer(receiver.kv), StagingBuffer(receiver.kv))
        self._calls = ThreadPoolExecutor(1, "kv-pull")
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
        with self._state:
            if self._jobs or self._held or self._released or self._busy:
                return False
            self.closed = True
            self._state.notify_all()
            return True

    def close(self) -> None:
        with self._state:
            self.closed = True
            dropped, self._jobs = list(self._jobs), deque()
            self._state.notify_all()
        for job in dropped:
            self._finish(job, AbortedError("the worker is shutting down"), 0.0)
        for thread in self._threads:
            thread.join(self._receiver.config.timeout_s)

    # The thread that speaks: leases and releases.

    def _speak(self) -> None:
        interval = self._receiver.config.lease_s / 3
        next_renewal = self._receiver.clock() + interval
        while True:
            with self._state:
                if not self._released and not self.closed:
                    self._state.wait(max(0.0, next_renewal - self._receiver.clock()))
                released, self._released = self._released, {}
                held = tuple(self._held)
                closed = self.closed
            self._tell_released(released)
            if closed:
                break
            if self._receiver.clock() >= next_renewal:
                self._renew(held)
                next_renewal = self._receiver.clock() + interval
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
        if unknown:
            logger.warning("%d leases had ended before their pull", len(unknown))

    # The thread that moves bytes.

    def _move(self) -> None:
        while (job := self._next_job()) is not None:
            started = self._receiver.clock()
            error: TwostrokeError | None = None
            try:
                if job.block_ids:
                    self._transfer(job, started + self._receiver.config.timeout_s)
            except TwostrokeError as failure:
                error = failure
            except Exception as failure:
                logger.exception("a KV transfer failed")
                error = TransferError(f"the KV transfer failed: {type(failure).__name__}")
            if error is not None:
                self._drop_channel()
            self._finish(job, error, self._receiver.clock() - started)
        self._drop_channel()
        self._calls.shutdown(wait=False)

    def _next_job(self) -> _Job | None:
        """The next job, or None when the peer has ended."""
        while True:
            with self._state:
                self._busy = False
                if not self._jobs and not self.closed:
                    self._state.wait(IDLE_S)
                if self._jobs:
                    self._busy = True
                    return self._jobs.popleft()
                if self.closed:
                    return None
            self._receiver.forget(self)

    def _finish(self, job: _Job, error: TwostrokeError | None, seconds: float) -> None:
        self.release(job.handle.handle_id, "received" if error is None else error.code)
        num_blocks = len(job.block_ids) if error is None else 0
        self._receiver.finished(
            PullDone(
                handle_id=job.handle.handle_id,
                request_id=job.handle.request_id,
                attempt=job.handle.attempt,
                error=error,
                num_blocks=num_blocks,
                num_bytes=num_blocks * self._receiver.layout.bytes_per_block,
                seconds=seconds,
            )
        )

    def _transfer(self, job: _Job, deadline: float) -> None:
        channel = self._open_channel(job, deadline)
        pull = channel.next_pull(job)
        parts = plan_messages(
            len(job.block_ids),
            self._receiver.layout.bytes_per_block,
            self._receiver.config.max_message_bytes,
        )
        incoming = _Incoming(self._receiver, channel.transport, self._staging, job, parts)
        incoming.post(0)  # before the owner is told: NCCL's rule
        reply = self._calls.submit(self._client.pull, pull)
        try:
            sums = incoming.receive(deadline)
            expected = reply.result(max(0.0, deadline - self._receiver.clock()))
        except TimeoutError:
            raise TransferError("the KV owner sent its blocks and no word") from None
        except TransferError:
            self._raise_owners_reason(reply)
            raise
        if sums != expected:
            raise TransferError("the KV arrived with another checksum than it was sent with")

    def _raise_owners_reason(self, reply: Future[tuple[bytes, ...]]) -> None:
        """The owner's refusal says more than the broken channel it caused."""
        try:
            reply.result(REFUSAL_GRACE_S)
        except TimeoutError:
            return

    def _open_channel(self, job: _Job, deadline: float) -> _Channel:
        if self._channel is None:
            self._channel = self._new_channel(job, deadline)
        return self._channel

    def _new_channel(self, job: _Job, deadline: float) -> _Channel:
        """Offer, let the owner check and join, meet it. Raises HandshakeRefusedError."""
        receiver = self._receiver
        self._num_channels += 1
        channel_id = f"{receiver.uid}.{id(self):x}.{self._num_channels}"
        listener = receiver.transports.listen(channel_id, receiver.host)
        try:
            self._client.connect(
                ChannelOffer(
                    channel_id=channel_id,
                    backend=receiver.transports.backend,
                    store_host=listener.meeting.host,
                    store_port=listener.meeting.port,
                    layout=receiver.layout,
                    incarnation=self._incarnation,
                )
            )
            return _Channel(channel_id, listener.accept(deadline - receiver.clock()))
        except BaseException:
            listener.close()
            raise

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.transport.close()
            self._channel = None


class _Channel:
    def __init__(self, channel_id: str, transport: Transport) -> None:
        self.channel_id = channel_id
        self.transport = transport
        self._num_transfers = 0

    def next_pull(self, job: _Job) -> PullRequest:
        self._num_transfers += 1
        return PullRequest(
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


class _Incoming:
    """The messages of one pull: while one is scattered, the next is already being received."""

    def __init__(
        self,
        receiver: KVReceiver,
        transport: Transport,
        staging: tuple[StagingBuffer, StagingBuffer],
        job: _Job,
        parts: list[range],
    ) -> None:
        self._receiver = receiver
        self._transport = transport
        self._staging = staging
        self._job = job
        self._parts = parts

    def post(self, index: int) -> None:
        if index < len(self._parts):
            self._message = self._staging[index % 2].message(len(self._parts[index]))
            self._pending = self._transport.post_recv(self._message)

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
            scatter_blocks(message, receiver.kv, self._job.block_ids[part.start : part.stop])
        return tuple(sums)
