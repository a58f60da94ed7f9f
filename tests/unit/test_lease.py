"""Leases against a model: who may read which blocks, and that every lease ends exactly once."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import StaleHandleError
from core.kv import BlockRef, KVHandle, KVLayout, PullRequest
from kv_transfer.lease import LeaseTable

LEASE_S = 5.0
LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=4,
    first_layer=0,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


def make_handle(number, num_blocks=3, request_id=None, attempt=0):
    return KVHandle(
        handle_id=f"h{number}",
        request_id=request_id or f"r{number}",
        attempt=attempt,
        worker="p",
        incarnation="now",
        address="p:1",
        layouts=(LAYOUT,),
        blocks=tuple(
            BlockRef(block_id=10 * number + i, generation=number) for i in range(num_blocks)
        ),
        block_hashes=tuple(bytes([number % 256, i]) for i in range(num_blocks - 1)),
        num_tokens=4 * num_blocks - 1,
        lease_s=LEASE_S,
    )


def make_pull(handle, first_position=0):
    return PullRequest(
        handle_id=handle.handle_id,
        request_id=handle.request_id,
        attempt=handle.attempt,
        incarnation=handle.incarnation,
        channel_id="c",
        transfer_id=1,
        first_position=first_position,
        blocks=handle.blocks[first_position // 4 :],
        block_hashes=handle.block_hashes,
    )


def other_block(pull, **change):
    return (*pull.blocks[:-1], replace(pull.blocks[-1], **change))


FORGERIES = {
    "incarnation": (lambda p: {"incarnation": "before"}, "another incarnation"),
    "handle_id": (lambda p: {"handle_id": "no such"}, "unknown handle"),
    "request_id": (lambda p: {"request_id": "other"}, "another request or attempt"),
    "attempt": (lambda p: {"attempt": p.attempt + 1}, "another request or attempt"),
    "negative first": (lambda p: {"first_position": -1}, "positions"),
    "past the end": (lambda p: {"first_position": 99}, "positions"),
    "another first": (lambda p: {"first_position": 4}, "block id or generation"),
    "too many": (lambda p: {"blocks": (*p.blocks, p.blocks[-1])}, "block id or generation"),
    "too few": (lambda p: {"blocks": p.blocks[:-1]}, "block id or generation"),
    "nothing": (lambda p: {"blocks": ()}, "block id or generation"),
    "block id": (lambda p: {"blocks": other_block(p, block_id=999)}, "block id or generation"),
    "generation": (lambda p: {"blocks": other_block(p, generation=0)}, "block id or generation"),
    "order": (lambda p: {"blocks": p.blocks[::-1]}, "block id or generation"),
    "hash": (lambda p: {"block_hashes": (b"other", *p.block_hashes[1:])}, "block hash"),
    "fewer hashes": (lambda p: {"block_hashes": p.block_hashes[:-1]}, "block hash"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_each_field_is_checked(forgery):
    table, handle = LeaseTable("now", LEASE_S), make_handle(1)
    table.offer(handle, 0.0)
    change, reason = FORGERIES[forgery]
    with pytest.raises(StaleHandleError, match=reason):
        table.begin(replace(make_pull(handle), **change(make_pull(handle))), 1.0)
    assert table.refusals == {reason: 1}
    table.begin(make_pull(handle), 1.0)  # the true one still works


@pytest.mark.parametrize("first_position", [0, 4, 5, 7, 12, 14])
def test_the_end_may_be_pulled_from_any_position(first_position):
    table, handle = LeaseTable("now", LEASE_S), make_handle(1, num_blocks=4)
    table.offer(handle, 0.0)
    assert table.begin(make_pull(handle, first_position), 0.0) == handle


@dataclass
class Model:
    handle: KVHandle
    expires: float
    readers: int = 0
    released: bool = False


class Leases(RuleBasedStateMachine):
    """The model is a dict of what is promised; `ended` counts what came out of drain_ended."""

    def __init__(self):
        super().__init__()
        self.table = LeaseTable("now", LEASE_S)
        self.now = 0.0
        self.live = {}
        self.offered = {}
        self.expected = Counter()
        self.ended = Counter()
        self.refusals = Counter()

    def some(self, data):
        return self.live[data.draw(st.sampled_from(sorted(self.live)))]

    def end(self, model):
        del self.live[model.handle.handle_id]
        self.expected[model.handle.handle_id] += 1

    def drop(self, model):
        if model.readers:
            model.released = True
        else:
            self.end(model)

    @rule(num_blocks=st.integers(2, 4), again=st.booleans())
    def offer(self, num_blocks, again):
        """Sometimes a second lease of the same request and attempt: both must come to an end."""
        number = len(self.offered) + 1
        request_id = f"r{number - 1}" if again and number > 1 else None
        handle = make_handle(number, num_blocks, request_id)
        self.table.offer(handle, self.now)
        self.live[handle.handle_id] = Model(handle, self.now + LEASE_S)
        self.offered[handle.handle_id] = handle

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.5, 5.0, 7.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def renew(self, data):
        ids = data.draw(st.lists(st.sampled_from([*sorted(self.offered), "never"]), unique=True))
        unknown = []
        for handle_id in ids:
            model = self.live.get(handle_id)
            if model is None or model.expires <= self.now:
                unknown.append(handle_id)
            else:
                model.expires = self.now + LEASE_S
        assert self.table.renew(ids, self.now) == tuple(unknown)

    def why_refused(self, model):
        if model.released:
            return "released"
        if model.expires <= self.now and not model.readers:
            return "expired"
        return None

    def refuse(self, pull, reason):
        with pytest.raises(StaleHandleError, match=reason):
            self.table.begin(pull, self.now)
        self.refusals[reason] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def begin(self, data):
        model = self.some(data)
        pull = make_pull(model.handle, data.draw(st.integers(0, model.handle.num_tokens - 1)))
        if (reason := self.why_refused(model)) is not None:
            self.refuse(pull, reason)
        else:
            self.table.begin(pull, self.now)
            model.readers += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forgery=st.sampled_from(sorted(FORGERIES)))
    def begin_forged(self, data, forgery):
        model = self.some(data)
        change, reason = FORGERIES[forgery]
        pull = replace(make_pull(model.handle), **change(make_pull(model.handle)))
        if forgery not in ("incarnation", "handle_id"):  # these are looked at first
            reason = self.why_refused(model) or reason
        self.refuse(pull, reason)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def begin_after_the_end(self, data):
        handle_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.refuse(make_pull(self.offered[handle_id]), "unknown handle")

    @precondition(lambda self: any(model.readers for model in self.live.values()))
    @rule(data=st.data())
    def finish(self, data):
        reading = sorted(name for name, model in self.live.items() if model.readers)
        model = self.live[data.draw(st.sampled_from(reading))]
        self.table.finish(model.handle.handle_id)
        model.readers -= 1
        if model.released and not model.readers:
            self.end(model)

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def release(self, data):
        handle_id = data.draw(st.sampled_from([*sorted(self.offered), "never"]))
        self.table.release(handle_id, "done")
        if handle_id in self.live:
            self.drop(self.live[handle_id])

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def release_request(self, data):
        handle = self.offered[data.draw(st.sampled_from(sorted(self.offered)))]
        attempt = data.draw(st.sampled_from([0, 0, 1]))
        self.table.release_request(handle.request_id, attempt, "aborted")
        for model in list(self.live.values()):
            if (model.handle.request_id, attempt) == (handle.request_id, 0):
                self.drop(model)

    @rule()
    def expire(self):
        self.table.expire(self.now)
        for model in list(self.live.values()):
            if model.expires <= self.now and not model.readers:
                self.end(model)

    @rule()
    def drain(self):
        for lease in self.table.drain_ended():
            self.ended[lease.handle_id] += 1
            blocks = self.offered[lease.handle_id].blocks
            assert lease.block_ids == tuple(block.block_id for block in blocks)
        assert self.ended == self.expected

    @invariant()
    def agrees(self):
        assert len(self.table) == len(self.live)
        assert self.table.refusals == self.refusals

    def teardown(self):
        for model in list(self.live.values()):
            for _ in range(model.readers):
                self.table.finish(model.handle.handle_id)
        self.table.expire(self.now + 10 * LEASE_S)
        self.expected.update(self.live.keys())
        self.drain()
        assert self.ended == Counter(self.offered.keys()), "every lease ends exactly once"


Leases.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase
