"""Which blocks are promised to whom, and until when. Pure: `now` is an argument, no thread, no I/O.

    offered --begin--> in transfer --finish--> offered
       |                   |
    release, expire     release: remembered, takes effect at finish
       v                   v
     ended               ended (once, with its block ids, through drain_ended)

A reference is checked field by field before anything is served: a mismatch is refused with the
reason, never answered from a block that has been given out anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from core.errors import StaleHandleError
from core.kv import KVHandle, PullRequest


@dataclass(slots=True)
class Lease:
    handle: KVHandle
    expires: float
    num_transfers: int = 0
    release_reason: str | None = None


class EndedLease(NamedTuple):
    handle_id: str
    block_ids: tuple[int, ...]
    reason: str


class LeaseTable:
    """Leases of one worker's incarnation. `refusals` counts refused pulls by reason."""

    def __init__(self, incarnation: str, lease_s: float) -> None:
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._leases: dict[str, Lease] = {}
        self._ended: list[EndedLease] = []
        self.refusals: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def offer(self, handle: KVHandle, now: float) -> None:
        assert handle.handle_id not in self._leases, handle.handle_id
        self._leases[handle.handle_id] = Lease(handle, now + self._lease_s)

    def renew(self, handle_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Push the end out; returns those that are not here (any more)."""
        unknown = []
        for handle_id in handle_ids:
            lease = self._leases.get(handle_id)
            if lease is None or lease.expires <= now:
                unknown.append(handle_id)
            else:
                lease.expires = now + self._lease_s
        return tuple(unknown)

    def begin(self, pull: PullRequest, now: float) -> KVHandle:
        """Check the reference and hold the lease for one transfer; returns what it refers to.
        Raises StaleHandleError."""
        reason = self._mismatch(pull, now)
        if reason is not None:
            self.refusals[reason] += 1
            raise StaleHandleError(f"the KV reference is refused: {reason}")
        lease = self._leases[pull.handle_id]
        lease.num_transfers += 1
        return lease.handle

    def _mismatch(self, pull: PullRequest, now: float) -> str | None:
        if pull.incarnation != self._incarnation:
            return "another incarnation"
        lease = self._leases.get(pull.handle_id)
        if lease is None:
            return "unknown handle"
        if lease.release_reason is not None:
            return "released"
        if lease.expires <= now and not lease.num_transfers:
            return "expired"
        handle = lease.handle
        if (pull.request_id, pull.attempt) != (handle.request_id, handle.attempt):
            return "another request or attempt"
        if not 0 <= pull.first_position < handle.num_tokens:
            return "positions"
        if pull.blocks != handle.blocks[pull.first_position // handle.block_size :]:
            return "block id or generation"
        if pull.block_hashes != handle.block_hashes:
            return "block hash"
        return None

    def finish(self, handle_id: str) -> None:
        """A transfer that `begin` allowed has ended, well or not."""
        lease = self._leases[handle_id]
        assert lease.num_transfers > 0, handle_id
        lease.num_transfers -= 1
        if not lease.num_transfers and lease.release_reason is not None:
            self._end(lease, lease.release_reason)

    def release(self, handle_id: str, reason: str) -> None:
        """Nobody wants it any more. Unknown handles are ignored: the lease may have ended."""
        lease = self._leases.get(handle_id)
        if lease is None:
            return
        if lease.num_transfers:
            lease.release_reason = reason
        else:
            self._end(lease, reason)

    def release_request(self, request_id: str, attempt: int, reason: str) -> None:
        handles = [lease.handle for lease in self._leases.values()]
        for handle in handles:
            if (handle.request_id, handle.attempt) == (request_id, attempt):
                self.release(handle.handle_id, reason)

    def expire(self, now: float) -> None:
        """End what nobody renewed. All leases are looked at: ends are not in order."""
        over = [x for x in self._leases.values() if x.expires <= now and not x.num_transfers]
        for lease in over:
            self._end(lease, "expired")

    def _end(self, lease: Lease, reason: str) -> None:
        handle = lease.handle
        del self._leases[handle.handle_id]
        block_ids = tuple(block.block_id for block in handle.blocks)
        self._ended.append(EndedLease(handle.handle_id, block_ids, reason))

    def drain_ended(self) -> list[EndedLease]:
        """Each ended lease once: its blocks may be freed."""
        ended, self._ended = self._ended, []
        return ended
