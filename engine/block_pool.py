"""Who holds which KV block. Knows block ids and hashes, no tensor and no sequence.

Every block is in exactly one state, and `check()` proves that the states sum to the whole pool:

    free         nothing in it that anyone may want
    cached       ref 0 and unleased, findable by its hash; evicted least recently used first
    owned        referenced by one or more sequences (shared prefixes count more than once)
    leased       referenced by no sequence, promised to a reader until the lease ends
    quarantined  its sequence is gone but a transfer may still write into it

A block can be owned and leased at once; it counts as owned. The generation of a block grows each
time it is given out anew, so a reference that carries (id, generation) goes stale by itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from core.config import CacheConfig
from core.kv import BlockRef
from core.prefix import BlockHash


@dataclass(slots=True)
class Block:
    block_id: int
    generation: int = 0
    ref_cnt: int = 0
    lease_cnt: int = 0
    quarantined: bool = False
    block_hash: BlockHash | None = None

    @property
    def idle(self) -> bool:
        return not (self.ref_cnt or self.lease_cnt or self.quarantined)


class CacheEvents(NamedTuple):
    """What became findable and what stopped being so, since the call before."""

    stored: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]


class PoolCounts(NamedTuple):
    free: int
    cached: int
    owned: int
    leased: int
    quarantined: int


class BlockPool:
    """`num_blocks` blocks of `block_size` positions each. Not thread-safe: owned by one thread."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_caching = enable_caching
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # idle blocks with a hash, LRU first
        self._leased: set[int] = set()  # owned or not
        self._num_quarantined = 0
        self._by_hash: dict[BlockHash, int] = {}
        self._stored: dict[BlockHash, None] = {}  # ordered sets
        self._evicted: dict[BlockHash, None] = {}

    @classmethod
    def for_cache(cls, num_blocks: int, config: CacheConfig) -> BlockPool:
        """The pool of a cache whose size is known by now."""
        return cls(num_blocks, config.block_size, enable_caching=config.enable_prefix_caching)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give out now: free or cached."""
        return len(self._free) + len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Ids of the longest run of leading hashes whose blocks are here. Takes no reference."""
        block_ids: list[int] = []
        for block_hash in block_hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these count as available now and would not after `share`."""
        return sum(self._blocks[block_id].idle for block_id in block_ids)

    def num_freed_by(
        self, block_ids: Iterable[Iterable[int]], besides: Collection[int] = ()
    ) -> int:
        """How many blocks would be available if these lists of owned blocks were freed; `besides`
        are not counted."""
        dropped = Counter(chain.from_iterable(block_ids))
        for block_id in besides:
            del dropped[block_id]
        return sum(
            self._blocks[block_id].ref_cnt == count and not self._blocks[block_id].lease_cnt
            for block_id, count in dropped.items()
        )

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference on blocks that hold content (found by `match_prefix`)."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.idle:
                del self._cached[block_id]
            block.ref_cnt += 1

    def is_exclusive(self, block_id: int) -> bool:
        """Whether its one owner may write to it: nobody else reads it, now or later."""
        block = self._blocks[block_id]
        return block.ref_cnt == 1 and not block.lease_cnt and block.block_hash is None

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` empty blocks with one reference each, or None and nothing changed."""
        if num_blocks > self.num_available:
            return None
        return [self._take() for _ in range(num_blocks)]

    def _take(self) -> int:
        if self._free:
            block = self._blocks[self._free.popleft()]
        else:
            block = self._blocks[self._cached.popitem(last=False)[0]]
            self._forget(block)
        block.generation += 1
        block.ref_cnt = 1
        return block.block_id

    def _forget(self, block: Block) -> None:
        assert block.block_hash is not None, block
        del self._by_hash[block.block_hash]
        _note(block.block_hash, self._evicted, self._stored)
        block.block_hash = None

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference each. Last block first, so that a chain is evicted from its end."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_cnt > 0, f"block {block_id} freed more often than taken"
            block.ref_cnt -= 1
            self._settle(block)

    def discard(self, block_ids: Sequence[int]) -> list[int]:
        """`free` for blocks whose content is not to be trusted: where this was the last holder
        nobody can find them any more. Returns those, to be cleared before their next use."""
        discarded = [
            block_id
            for block_id in block_ids
            if self._blocks[block_id].ref_cnt == 1 and not self._blocks[block_id].lease_cnt
        ]
        for block in (self._blocks[block_id] for block_id in discarded):
            if block.block_hash is not None:
                self._forget(block)
        self.free(block_ids)
        return discarded

    def _settle(self, block: Block) -> None:
        """Put a block that just lost a holder where it belongs."""
        if not block.idle:
            return
        if block.block_hash is None:
            self._free.append(block.block_id)
        else:
            self._cached[block.block_id] = None

    def cache(self, block_id: int, block_hash: BlockHash) -> None:
        """Make a full, verified, owned block findable. A known hash keeps its first block."""
        block = self._blocks[block_id]
        assert block.ref_cnt > 0, f"only an owned block can be cached: {block}"
        if not self._enable_caching or block_hash in self._by_hash:
            return
        assert block.block_hash is None, f"block {block_id} holds another prefix already"
        block.block_hash = block_hash
        self._by_hash[block_hash] = block_id
        _note(block_hash, self._stored, self._evicted)

    def refs(self, block_ids: Iterable[int]) -> tuple[BlockRef, ...]:
        """The blocks as another process may name them."""
        return tuple(
            BlockRef(block_id=block_id, generation=self._blocks[block_id].generation)
            for block_id in block_ids
        )

    def lease(self, block_ids: Iterable[int]) -> None:
        """Promise owned blocks to a reader; the sequence may be freed meanwhile."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_cnt > 0, f"only an owned block can be leased: {block}"
            block.lease_cnt += 1
            self._leased.add(block_id)

    def end_lease(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.lease_cnt > 0, f"block {block_id} was not leased"
            block.lease_cnt -= 1
            if not block.lease_cnt:
                self._leased.remove(block_id)
            self._settle(block)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Drop the reference on blocks that a transfer may still write to; nobody gets them yet.

        They must be owned once and unhashed: blocks under transfer are never shared or cached.
        """
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_cnt == 1, f"a block under transfer has one owner: {block}"
            assert block.block_hash is None, f"a block under transfer is not cached: {block}"
            block.ref_cnt = 0
            block.quarantined = True
            self._num_quarantined += 1

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        """The last writer has ended."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.quarantined, block
            block.quarantined = False
            self._num_quarantined -= 1
            self._settle(block)

    def drain_events(self) -> CacheEvents:
        """Net changes of the findable set since the last call: what came and went is in neither."""
        events = CacheEvents(tuple(self._stored), tuple(self._evicted))
        self._stored, self._evicted = {}, {}
        return events

    @property
    def block_hashes(self) -> tuple[BlockHash, ...]:
        """All findable hashes: the truth that an index resynchronises from."""
        return tuple(self._by_hash)

    def counts(self) -> PoolCounts:
        """How many blocks are in each state."""
        free, cached, quarantined = len(self._free), len(self._cached), self._num_quarantined
        leased = sum(self._blocks[block_id].ref_cnt == 0 for block_id in self._leased)
        owned = self.num_blocks - free - cached - leased - quarantined
        return PoolCounts(free, cached, owned, leased, quarantined)

    def check(self) -> PoolCounts:
        """Assert the conservation law and the agreement of all three views of a block."""
        counts = self.counts()
        owned = sum(block.ref_cnt > 0 for block in self._blocks)
        assert owned == counts.owned, f"{owned} blocks are owned; what is left by {counts} is not"
        quarantined = sum(block.quarantined for block in self._blocks)
        assert quarantined == counts.quarantined, f"{quarantined} blocks in quarantine: {counts}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block in self._blocks:
            assert block.ref_cnt >= 0, block
            assert (block.lease_cnt > 0) == (block.block_id in self._leased), block
            assert block.idle == (block.block_id in free or block.block_id in self._cached), block
            assert (block.block_id in free) == (block.idle and block.block_hash is None), block
            if block.block_hash is not None:
                assert self._by_hash[block.block_hash] == block.block_id, block
        assert len(self._by_hash) == sum(b.block_hash is not None for b in self._blocks)
        return counts


def _note(
    block_hash: BlockHash, happened: dict[BlockHash, None], undone: dict[BlockHash, None]
) -> None:
    if block_hash in undone:
        del undone[block_hash]
    else:
        happened[block_hash] = None
