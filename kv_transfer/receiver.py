"""The reader's side of transfers: keeps leases alive, pulls blocks, says when they are complete.

One peer object per (owner address, incarnation), with two threads: one moves bytes, one job after
the other; one sends the small words (renew, release), so that a long transfer delays no lease.
The step thread only hands in and collects; no call of it waits for the network.

Locks are taken in this order: the receiver's, then a peer's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from core.config import TransferConfig
from core.errors import AbortedError, RankLostError, TransferError, TwostrokeError
from core.kv import KVHandle, KVLayout
from kv_transfer.link import IDLE_S, KVOwner, OwnerLink, ReceivingRank, Wanted
from kv_transfer.plan import plan_pieces
from kv_transfer.transport import bare

logger = logging.getLogger(__name__)

MAX_PEERS = 128
"""Owners dealt with at a time: each costs two threads and a few sockets."""
MIN_RENEWAL_S = 0.02
"""Between two renewals, whatever a handle says of its lease."""


class PeerClient(KVOwner, Protocol):
    """Calls to the owner of blocks. Synchronous and thread-safe; raises TwostrokeError only."""

    def renew(self, handle_ids: Sequence[str]) -> tuple[str, ...]: ...

    def release(self, handle_ids: Sequence[str], reason: str) -> None: ...

    def close(self) -> None: ...


PeerConnector = Callable[[str], PeerClient]
"""Address -> client. Must not block."""


class RankLink(Protocol):
    """The way of one of this worker's ranks to one owner: see kv_transfer/link.OwnerLink."""

    def pull(self, wanted: Wanted, deadline: float) -> None:
        """Raises RankLostError when it is not known whether the rank still writes."""
        ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


RankLinker = Callable[[], RankLink]
"""A new link of another rank, to the owner that its pulls will name. Must not block."""


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
    wanted: Wanted
    layouts: tuple[KVLayout, ...]
    """Of the ranks that pull."""

    @property
    def handle_id(self) -> str:
        return self.wanted.handle.handle_id

    @property
    def key(self) -> tuple[str, int]:
        return self.wanted.handle.request_id, self.wanted.handle.attempt

    def done(self, error: TwostrokeError | None, seconds: float) -> PullDone:
        request_id, attempt = self.key
        return PullDone(
            handle_id=self.handle_id,
            request_id=request_id,
            attempt=attempt,
            error=error,
            num_blocks=len(self.wanted.block_ids) if error is None else 0,
            num_bytes=self._num_bytes() if error is None else 0,
            seconds=seconds,
        )

    def _num_bytes(self) -> int:
        """On the way, to all ranks."""
        wanted = self.wanted
        pieces = plan_pieces(wanted.handle.layouts, self.layouts) if wanted.block_ids else ()
        return sum(
            -(-len(wanted.positions) // piece.layout.block_size) * piece.layout.bytes_per_block
            for piece in pieces
        )


class KVReceiver:
    def __init__(
        self,
        rank: ReceivingRank,
        *,
        peers: PeerConnector,
        other_ranks: Sequence[RankLinker] = (),
        on_rank_lost: Callable[[str], None] = lambda _: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`rank` is rank 0, in this process."""
        self.rank = rank
        self.config: TransferConfig = rank.config
        self.clock = rank.clock
        self.other_ranks = tuple(other_ranks)
        self.on_rank_lost = on_rank_lost
        """Told, from a transfer thread, why this worker must end: nobody knows whether another rank
        still writes into the blocks of a pull, so no PullDone may ever give them free."""
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

    def start(self, handle: KVHandle, first_position: int, block_ids: Sequence[int]) -> None:
        """Pull what `handle` covers from `first_position` on, where a block of ours begins, into
        `block_ids`, on all ranks; nothing left to pull only releases."""
        wanted = Wanted(handle=handle, first_position=first_position, block_ids=tuple(block_ids))
        block_size, positions = self.rank.layout.block_size, wanted.positions
        assert first_position % block_size == 0, first_position
        assert len(block_ids) == -(-len(positions) // block_size), (positions, len(block_ids))
        job = _Job(wanted=wanted, layouts=self.rank.layouts)
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
        self._links: list[RankLink] = [OwnerLink(receiver.rank, client, handle.incarnation)]
        self._links += [new_link() for new_link in receiver.other_ranks]
        self._pulls = ThreadPoolExecutor(len(self._links), "kv-ranks")
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
            self._held.add(job.handle_id)
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
            self._state.notify_all()
        for link in self._links:
            link.close()

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
            if isinstance(error, RankLostError):
                self._receiver.on_rank_lost(error.message)
                break
            seconds = clock() - started
            self._finish(job, error, seconds)
            if error is not None and seconds >= self._receiver.config.timeout_s:
                self._fail_queued(error)
        for link in self._links:
            link.close()
        self._pulls.shutdown(wait=False)
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
        self.release(job.handle_id, "received" if error is None else error.code)
        self._receiver.finished(job.done(error, seconds))

    def _attempt(self, job: _Job, deadline: float) -> TwostrokeError | None:
        """Why the job failed."""
        try:
            if job.wanted.block_ids:
                self._pull(job.wanted, deadline)
        except Exception as error:
            if self._closed:
                return _shutting_down()
            if isinstance(error, TwostrokeError):
                return bare(error)
            logger.exception("a KV transfer failed")
            return TransferError(f"the KV transfer failed: {type(error).__name__}")
        return None

    def _pull(self, wanted: Wanted, deadline: float) -> None:
        """All ranks at once. Returns or raises when none of them writes any more."""
        first, *others = self._links
        pulls = [self._pulls.submit(link.pull, wanted, deadline) for link in others]
        try:
            first.pull(wanted, deadline)
            for pull in wait(pulls, return_when=FIRST_EXCEPTION).done:
                pull.result()
        except BaseException:
            for link, pull in zip(others, pulls, strict=True):
                if not pull.done():  # who has ended writes no more, and may not answer either
                    link.drop()
            wait(pulls)
            for pull in pulls:
                if isinstance(error := pull.exception(), RankLostError):
                    raise error from None
            raise
