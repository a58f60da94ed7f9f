"""Admission: who gets slots and blocks. Pure, so every refusal and every wait is a few lines."""

from dataclasses import replace

import pytest

from core.errors import ContextLengthError, StaleHandleError
from core.kv import BlockRef, KVHandle, KVLayout
from core.prefix import hash_blocks, hash_root
from decode_workers.admission import Admission, Arrival
from engine.block_pool import BlockPool
from engine.sequence import Sequence

ROOT = hash_root(model="m")
LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=4,
    first_layer=0,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


@pytest.fixture
def arrive(make_request):
    def make(prompt, request_id="r", priority=0):
        """A prompt that was prefilled elsewhere, with 9 as its first output token."""
        request = make_request(prompt, request_id=request_id, output=(9,), priority=priority)
        num_tokens = len(prompt)
        handle = KVHandle(
            handle_id="h" + request_id,
            request_id=request_id,
            attempt=0,
            worker="p",
            incarnation="i",
            address="a",
            layouts=(LAYOUT,),
            blocks=tuple(BlockRef(block_id=i, generation=1) for i in range(-(-num_tokens // 4))),
            block_hashes=tuple(hash_blocks(prompt, 4, ROOT)),
            num_tokens=num_tokens,
            lease_s=5.0,
        )
        return Arrival(sequence=Sequence(request, ROOT), handle=handle)

    return make


def admission(num_blocks=8, max_num_seqs=4, max_model_len=32):
    pool = BlockPool(num_blocks, 4)
    return Admission(pool, max_num_seqs, max_model_len), pool


def test_priority_goes_before_arrival(arrive):
    line, _ = admission()
    for name, priority in (("a", 0), ("b", 0), ("urgent", -1)):
        line.add(arrive([1, 2], request_id=name, priority=priority))
    admitted = [line.admit(num_running=i).sequence.request.request_id for i in range(3)]
    assert admitted == ["urgent", "a", "b"]


def test_admitted_with_blocks_for_the_handle(arrive):
    line, pool = admission()
    line.add(arrive(range(9)))
    arrival = line.admit(num_running=0)
    assert arrival is not None
    assert len(arrival.sequence.block_ids) == 3
    assert arrival.pulled_block_ids == arrival.sequence.block_ids
    assert line.admit(num_running=1) is None
    assert pool.check().owned == 3


def test_local_prefix_is_shared_and_not_pulled(arrive):
    line, pool = admission()
    prompt = list(range(9))
    mine = pool.allocate(2)
    for block_id, block_hash in zip(mine, hash_blocks(prompt, 4, ROOT), strict=True):
        pool.cache(block_id, block_hash)
    pool.free(mine)
    line.add(arrive(prompt))
    arrival = line.admit(num_running=0)
    assert arrival is not None
    assert arrival.num_local_blocks == 2
    assert arrival.sequence.block_ids[:2] == mine
    assert len(arrival.pulled_block_ids) == 1


def test_waits_for_a_slot_and_for_blocks_in_order(arrive):
    line, pool = admission(num_blocks=4, max_num_seqs=2)
    line.add(arrive(range(12), "big"))
    line.add(arrive(range(2), "small"))
    assert line.admit(num_running=2) is None, "no slot"
    assert line.admit(num_running=1) is None, "3 blocks and one for each to grow into are not there"
    assert [a.handle.request_id for a in line.waiting] == ["big", "small"], "nobody overtakes"
    arrival = line.admit(num_running=0)
    assert arrival is not None
    assert arrival.handle.request_id == "big"
    assert pool.num_available == 1


def test_alone_it_may_take_the_last_block(arrive):
    line, pool = admission(num_blocks=3)
    line.add(arrive(range(12)))
    assert line.admit(num_running=0) is not None
    assert pool.num_available == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_tokens": 8}, StaleHandleError),
        ({"request_id": "other"}, StaleHandleError),
        ({"attempt": 1}, StaleHandleError),
        ({"block_hashes": tuple(hash_blocks(range(1, 10), 4, ROOT))}, StaleHandleError),
        ({"block_hashes": ()}, StaleHandleError),
        ({"blocks": ()}, StaleHandleError),
    ],
)
def test_a_handle_of_something_else_is_refused(arrive, change, error):
    line, pool = admission()
    arrival = arrive(range(9))
    with pytest.raises(error):
        line.add(replace(arrival, handle=replace(arrival.handle, **change)))
    assert not line.waiting
    assert pool.check().free == 8


def test_what_can_never_fit_is_refused_at_once(arrive):
    line, _ = admission(max_model_len=9)
    with pytest.raises(ContextLengthError):
        line.add(arrive(range(9)))


def test_abort_in_the_line(arrive):
    line, pool = admission()
    line.add(arrive(range(4), "a"))
    line.add(arrive(range(4), "b"))
    assert line.abort("a", 1) is None
    assert line.abort("a", 0) is not None
    assert line.abort("a", 0) is None
    assert [a.handle.request_id for a in line.waiting] == ["b"]
    assert pool.check().free == 8
