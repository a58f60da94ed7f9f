"""The in-memory prefix index against a plain model of what workers hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core.prefix import BlockHash
from core.worker import WorkerId, WorkerReport
from router.prefix_index import MemoryPrefixIndex


def block_hash(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "little"))


def chain(*indexes: int) -> list[BlockHash]:
    return [block_hash(i) for i in indexes]


def worker(name: str = "a", incarnation: str = "1") -> WorkerId:
    return WorkerId(name=name, incarnation=incarnation)


def report(number: int, stored=(), evicted=()) -> WorkerReport:
    return WorkerReport(
        sequence_number=number,
        num_waiting=0,
        num_running=0,
        num_queued_tokens=0,
        num_free_blocks=0,
        num_leased_blocks=0,
        num_cached_blocks=0,
        num_blocks=0,
        stored=tuple(chain(*stored)),
        evicted=tuple(chain(*evicted)),
    )


def test_match_counts_the_leading_blocks_of_each_worker():
    index = MemoryPrefixIndex()
    index.apply(worker("a"), report(1, stored=[1, 2, 3]))
    index.apply(worker("b"), report(1, stored=[1, 3]))
    index.apply(worker("c"), report(1, stored=[2, 3]))
    assert index.match(chain(1, 2, 3, 4), 0) == {worker("a"): 3, worker("b"): 1}
    assert index.match([], 0) == {}


def test_eviction_shortens_the_match():
    index = MemoryPrefixIndex()
    index.apply(worker(), report(1, stored=[1, 2, 3]))
    index.apply(worker(), report(2, evicted=[2]))
    assert index.match(chain(1, 2, 3), 0) == {worker(): 1}
    index.apply(worker(), report(3, stored=[2]))
    assert index.match(chain(1, 2, 3), 0) == {worker(): 3}


def test_a_block_evicted_and_stored_again_in_one_report_is_there():
    index = MemoryPrefixIndex()
    index.apply(worker(), report(1, stored=[1]))
    index.apply(worker(), report(2, stored=[1], evicted=[1]))
    assert index.match(chain(1), 0) == {worker(): 1}


def test_a_gap_or_a_number_that_goes_back_clears_the_worker():
    for number in (3, 1, 0):
        index = MemoryPrefixIndex()
        index.apply(worker(), report(1, stored=[1, 2]))
        index.apply(worker(), report(number, stored=[2]))
        assert index.match(chain(1, 2), 0) == {}
        assert index.match(chain(2), 0) == {worker(): 1}
        index.apply(worker(), report(number + 1, stored=[1]))
        assert index.match(chain(1, 2), 0) == {worker(): 2}, "and it goes on from there"


def test_a_new_incarnation_replaces_the_old_one():
    index = MemoryPrefixIndex()
    index.apply(worker(incarnation="1"), report(7, stored=[1, 2]))
    index.apply(worker("b"), report(1, stored=[1]))
    index.apply(worker(incarnation="2"), report(1, stored=[1]))
    assert index.match(chain(1, 2), 0) == {worker("b"): 1, worker(incarnation="2"): 1}


def test_removed_and_added_again():
    index = MemoryPrefixIndex()
    index.apply(worker(), report(5, stored=[1]))
    index.remove(worker())
    index.remove(worker())
    assert index.match(chain(1), 0) == {}
    assert index.num_blocks == 0
    index.apply(worker(), report(5, stored=[1]))
    assert index.match(chain(1), 0) == {worker(): 1}


def test_decisions_count_at_once_and_for_a_short_time():
    index = MemoryPrefixIndex(speculation_s=5)
    index.expect(worker(), chain(1, 2), now=100)
    assert index.match(chain(1, 2), 104.9) == {worker(): 2}
    assert index.match(chain(1, 2), 105) == {}
    assert index.num_blocks == 0


def test_a_confirmed_decision_stays_and_a_repeated_one_lives_on():
    index = MemoryPrefixIndex(speculation_s=5)
    index.expect(worker(), chain(1, 2), now=0)
    index.apply(worker(), report(1, stored=[1]))
    index.expect(worker(), chain(1, 2), now=3)
    assert index.match(chain(1, 2), 6) == {worker(): 2}
    assert index.match(chain(1, 2), 8) == {worker(): 1}


def test_memory_is_bounded():
    index = MemoryPrefixIndex(max_blocks=10)
    index.apply(worker("a"), report(1, stored=range(100)))
    index.expect(worker("b"), chain(*range(200, 300)), now=0)
    assert index.num_blocks == 10
    assert index.match(chain(*range(200, 300)), 1) == {worker("b"): 10}
    assert index.match(chain(0), 1) == {}


def test_chains_lose_their_end_first():
    """However they came in: by a report, by a decision, or by a decision confirmed in chunks."""
    for number in range(3):
        index = MemoryPrefixIndex(max_blocks=6)
        if number:
            index.expect(worker("a"), chain(1, 2, 3, 4), now=0)
        if number == 0:
            index.apply(worker("a"), report(1, stored=[1, 2, 3, 4]))
        if number == 2:
            for block in (1, 2, 3, 4):
                index.apply(worker("a"), report(block, stored=[block]))
        index.apply(worker("b"), report(1, stored=[11, 12, 13, 14]))
        assert index.match(chain(1, 2, 3, 4), 1) == {worker("a"): 2}
        assert index.match(chain(11, 12, 13, 14), 1) == {worker("b"): 4}


def test_a_shared_start_in_use_outlives_what_came_later():
    index = MemoryPrefixIndex(max_blocks=4)
    index.apply(worker("a"), report(1, stored=[1, 2]))
    for other in range(10, 30):
        index.apply(worker("b"), report(other, stored=[other]))
        assert index.match(chain(1, 2, 1000 + other), 0) == {worker("a"): 2}
        assert index.num_blocks <= 4


def test_expecting_a_confirmed_chain_uses_it():
    index = MemoryPrefixIndex(max_blocks=4)
    index.apply(worker("a"), report(1, stored=[1, 2]))
    index.apply(worker("a"), report(2, stored=[3, 4]))
    index.expect(worker("a"), chain(1, 2), now=0)
    index.apply(worker("a"), report(3, stored=[5, 6]))
    assert index.match(chain(1, 2), 0) == {worker("a"): 2}
    assert index.match(chain(3, 4), 0) == {}


blocks = st.lists(st.integers(0, 5), unique=True, max_size=4)
operations = st.lists(
    st.tuples(
        st.sampled_from(["report", "gap", "restart", "remove"]),
        st.sampled_from("abc"),
        blocks,
        blocks,
    ),
    max_size=30,
)


@settings(deadline=None)
@given(operations)
def test_index_equals_what_the_workers_said(steps):
    index = MemoryPrefixIndex()
    truth: dict[WorkerId, set[int]] = {}
    numbers: dict[str, int] = {}
    lives = dict.fromkeys("abc", 0)
    for kind, name, stored, evicted in steps:
        if kind == "restart":
            truth.pop(worker(name, str(lives[name])), None)
            lives[name] += 1
            numbers.pop(name, None)
        who = worker(name, str(lives[name]))
        if kind == "remove":
            index.remove(who)
            truth.pop(who, None)
            numbers.pop(name, None)
            continue
        if kind == "gap":
            truth.pop(who, None)
        numbers[name] = numbers.get(name, 0) + (2 if kind == "gap" and name in numbers else 1)
        index.apply(who, report(numbers[name], stored, evicted))
        truth[who] = (truth.get(who, set()) - set(evicted)) | set(stored)
    for i in range(6):
        expected = {who: 1 for who, held in truth.items() if i in held}
        assert index.match(chain(i), 0) == expected
    assert index.num_blocks == len(set().union(*truth.values(), set()))
