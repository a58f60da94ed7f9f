"""BlockPool: the conservation law under random use, and what each operation promises."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.prefix import BlockHash, hash_blocks, hash_root
from engine.block_pool import BlockPool

ROOT = hash_root(model="m")


def hashes(count: int, seed: int = 0) -> list[BlockHash]:
    return hash_blocks([seed] * count, 1, ROOT)


def test_allocate_is_all_or_nothing():
    pool = BlockPool(4, 16)
    assert pool.allocate(5) is None
    assert pool.num_available == 4
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


def test_cached_blocks_are_found_shared_and_evicted_from_the_end_of_the_chain():
    pool = BlockPool(4, 16)
    block_ids = pool.allocate(3)
    chain = hashes(3)
    for block_id, block_hash in zip(block_ids, chain, strict=True):
        pool.cache(block_id, block_hash)
    pool.free(block_ids)
    assert pool.check().cached == 3
    assert pool.match_prefix(chain) == block_ids
    pool.allocate(2)  # the free one, then the end of the chain
    assert pool.match_prefix(chain) == block_ids[:2]
    assert pool.drain_events().evicted == ()  # stored and evicted between two calls: never seen
    pool.share(block_ids[:2])
    assert pool.allocate(1) is None, "a shared block is not available"


def test_events_report_each_change_once():
    pool = BlockPool(2, 16)
    chain = hashes(2)
    for block_id, block_hash in zip(pool.allocate(2), chain, strict=True):
        pool.cache(block_id, block_hash)
    assert pool.drain_events() == (tuple(chain), ())
    pool.free([0, 1])
    pool.allocate(1)
    assert pool.drain_events() == ((), (chain[1],))
    assert pool.drain_events() == ((), ())


def test_generation_grows_each_time_a_block_is_given_out():
    pool = BlockPool(1, 16)
    seen = []
    for _ in range(3):
        pool.allocate(1)
        seen.append(pool.refs([0])[0].generation)
        pool.free([0])
    assert seen == [1, 2, 3]


def test_leased_block_outlives_its_sequence_and_is_not_given_out():
    pool = BlockPool(1, 16)
    pool.allocate(1)
    pool.lease([0])
    pool.free([0])
    assert pool.check().leased == 1
    assert pool.allocate(1) is None
    pool.end_lease([0])
    assert pool.check().free == 1


def test_quarantined_block_is_not_given_out():
    pool = BlockPool(1, 16)
    pool.allocate(1)
    pool.quarantine([0])
    assert pool.check().quarantined == 1
    assert pool.allocate(1) is None
    pool.end_quarantine([0])
    assert pool.allocate(1) == [0]


@pytest.mark.parametrize("misuse", ["free", "end_lease", "lease", "quarantine"])
def test_misuse_is_an_assertion(misuse):
    pool = BlockPool(1, 16)
    with pytest.raises(AssertionError):
        getattr(pool, misuse)([0])


def test_caching_off_stores_nothing():
    pool = BlockPool(1, 16, enable_caching=False)
    pool.allocate(1)
    pool.cache(0, hashes(1)[0])
    assert pool.match_prefix(hashes(1)) == []
    pool.free([0])
    assert pool.check().free == 1


class PoolMachine(RuleBasedStateMachine):
    """Random sequences, leases and quarantines over 8 blocks; a model counts who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(8, 1)
        self.sequences: list[tuple[list[int], int]] = []  # blocks, number of private blocks
        self.leases: list[list[int]] = []
        self.quarantines: list[list[int]] = []

    @rule(seed=st.integers(0, 2), length=st.integers(1, 6))
    def start(self, seed, length):
        chain = hashes(length, seed)
        cached = self.pool.match_prefix(chain[: length - 1])
        if length - len(cached) + self.pool.num_idle(cached) > self.pool.num_available:
            return
        self.pool.share(cached)
        new = self.pool.allocate(length - len(cached))
        assert new is not None
        self.sequences.append((cached + new, len(new)))
        if seed < 2:
            for block_id, block_hash in zip(
                (cached + new)[len(cached) :], chain[len(cached) :], strict=True
            ):
                self.pool.cache(block_id, block_hash)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def stop(self, data):
        blocks, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.free(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def lease(self, data):
        blocks, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.lease(blocks)
        self.pool.free(blocks)
        self.leases.append(blocks)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data):
        self.pool.end_lease(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule(count=st.integers(1, 3))
    def quarantine(self, count):
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.pool.quarantine(blocks)
            self.quarantines.append(blocks)

    @precondition(lambda self: self.quarantines)
    @rule()
    def end_quarantine(self):
        self.pool.end_quarantine(self.quarantines.pop())

    @invariant()
    def conserved(self):
        counts = self.pool.check()
        owned = {block for blocks, _ in self.sequences for block in blocks}
        leased = {block for blocks in self.leases for block in blocks} - owned
        assert counts.owned == len(owned)
        assert counts.leased == len(leased)
        assert counts.quarantined == sum(map(len, self.quarantines))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
