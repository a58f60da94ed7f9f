"""Which handed-over requests get slots and blocks, and when. Pure: no clock, no transfer.

By priority, then first come, first served. A request is admitted when its prompt's blocks fit and
every sequence here still has a block to grow into, so that admitting more does not turn into
preempting at once.
"""

from __future__ import annotations

from bisect import insort_right
from dataclasses import dataclass
from operator import attrgetter

from core.errors import ContextLengthError, StaleHandleError
from core.kv import KVHandle
from core.prefix import BlockHash, hash_blocks
from engine.block_pool import BlockPool
from engine.sequence import Sequence
from kv_transfer.receiver import PullDone


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A request between hand-over and its first decode step."""

    sequence: Sequence
    handle: KVHandle
    num_local_blocks: int = 0
    """Leading blocks found in this worker's prefix cache: shared, not pulled."""
    admitted: float = 0.0
    pulled: float = 0.0
    done: PullDone | None = None
    """Set when its KV has arrived."""

    @property
    def pulled_block_ids(self) -> list[int]:
        """Blocks the transfer writes into: owned by this sequence alone, not yet findable."""
        return self.sequence.block_ids[self.num_local_blocks :]


class Admission:
    """The waiting line. Takes blocks from the pool on `admit`; who leaves otherwise took none."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_model_len: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self.waiting: list[Arrival] = []
        """In the order of their sequences."""

    def add(self, arrival: Arrival) -> None:
        """Raises ContextLengthError when it can never fit, StaleHandleError when the handle is not
        of this request's tokens."""
        sequence, handle = arrival.sequence, arrival.handle
        num_tokens = len(sequence.token_ids)
        if num_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"{num_tokens} tokens leave no room in a context of {self._max_model_len}"
            )
        if (handle.request_id, handle.attempt) != sequence.key:
            raise StaleHandleError("the handle is of another request or attempt")
        if handle.num_tokens != num_tokens - 1:
            raise StaleHandleError(
                f"the handle covers {handle.num_tokens} tokens, the request needs {num_tokens - 1}"
            )
        block_size = handle.block_size  # the owner's, which may be another than ours
        if tuple(self._hashes(sequence, handle.num_tokens, block_size)) != handle.block_hashes:
            raise StaleHandleError("the handle's block hashes are of other tokens")
        if len(handle.blocks) != -(-handle.num_tokens // block_size):
            raise StaleHandleError(
                f"{len(handle.blocks)} blocks cannot be the KV of {handle.num_tokens} tokens"
            )
        insort_right(self.waiting, arrival, key=attrgetter("sequence.order"))

    def _hashes(self, sequence: Sequence, num_tokens: int, block_size: int) -> list[BlockHash]:
        """Of full blocks of that size. The sequence keeps those of ours: they are wanted again."""
        if block_size == self._pool.block_size:
            return sequence.hashes(num_tokens // block_size, block_size)
        return hash_blocks(sequence.token_ids[:num_tokens], block_size, sequence.root)

    def admit(self, num_running: int) -> Arrival | None:
        """The head of the line, with blocks, when it fits beside `num_running` others."""
        if not self.waiting or num_running >= self._max_num_seqs:
            return None
        arrival, pool = self.waiting[0], self._pool
        sequence = arrival.sequence
        num_tokens = arrival.handle.num_tokens
        local = pool.match_prefix(self._hashes(sequence, num_tokens, pool.block_size))
        num_new = pool.num_blocks_for(num_tokens) - len(local)
        # Alone it may take the last block; beside others each keeps one to grow into.
        num_reserved = num_running + 1 if num_running else 0
        if num_new + pool.num_idle(local) + num_reserved > pool.num_available:
            return None
        pool.share(local)
        new = pool.allocate(num_new)
        assert new is not None, "the pool said there was room"
        sequence.block_ids = local + new
        sequence.num_hashed_blocks = len(local)
        arrival.num_local_blocks = len(local)
        return self.waiting.pop(0)

    def abort(self, request_id: str, attempt: int) -> Arrival | None:
        for arrival in self.waiting:
            if arrival.sequence.key == (request_id, attempt):
                self.waiting.remove(arrival)
                return arrival
        return None
