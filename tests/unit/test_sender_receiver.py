"""Sender and receiver in one process, over the loopback transport, which has NCCL's manners.

Whatever goes wrong, each pull ends exactly once, with the right bytes or a named error, the next
pull works, and leases, channels and threads come back.
"""

import threading
import time
from dataclasses import replace

import pytest
import torch

import kv_transfer.link
import kv_transfer.loopback
import kv_transfer.receiver
import kv_transfer.sender
from core.config import TransferConfig
from core.errors import (
    AbortedError,
    HandshakeRefusedError,
    InternalError,
    RankLostError,
    StaleHandleError,
    TransferError,
    TwostrokeError,
)
from core.kv import BlockRef, ChannelOffer, KVLayout, PullRequest
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from cpu_kernels.kv_order import tile, untile
from kv_transfer.link import ReceivingRank
from kv_transfer.loopback import LoopbackTransports
from kv_transfer.rank_sender import RankSender
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender

LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=4,
    first_layer=0,
    num_layers=2,
    num_kv_heads=2,
    head_dim=3,
)
BLOCK_BYTES = LAYOUT.bytes_per_block
NUM_BLOCKS = 16


def make_pool(fill, layout=LAYOUT):
    shape = (2, 2, NUM_BLOCKS, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.randn(shape) if fill else torch.zeros(shape)


class Client:
    """The owner, called directly instead of over gRPC; `before` and `after` run around a pull."""

    def __init__(self, rig):
        self.rig = rig
        self.sender = rig.sender

    def connect(self, offer, timeout_s):
        self.rig.num_connects += 1
        self.rig.sender.connect(offer)

    def pull(self, pull):
        self.rig.pulls.append(pull)
        self.rig.before(pull)
        try:
            return self.rig.sender.pull(pull)
        except TwostrokeError:
            raise
        except Exception as error:
            raise InternalError("as the service does") from error
        finally:
            self.rig.after(pull)

    def renew(self, handle_ids):
        return self.rig.sender.renew(handle_ids)

    def release(self, handle_ids, reason):
        for handle_id in handle_ids:
            self.rig.released.append((handle_id, reason))
            self.rig.sender.release(handle_id, reason)

    def close(self):
        self.rig.num_closed += 1


class Rig:
    def __init__(
        self,
        *,
        layout=LAYOUT,
        owner_layout=LAYOUT,
        owner_layouts=(),
        owner=None,
        other_ranks=(),
        wrap=lambda transport: transport,
        **config,
    ):
        self.config = TransferConfig(
            **{
                "lease_s": 5.0,
                "timeout_s": 5.0,
                "max_message_bytes": 2 * BLOCK_BYTES,
                "verify_checksum": True,
                **config,
            }
        )
        self.owner_config = replace(self.config, **(owner or {}))
        self.transports = Wrapped(wrap)
        self.owner_layouts = tuple(owner_layouts) or (owner_layout,)
        self.owner_layout = self.owner_layouts[0]
        self.sources = [make_pool(True, each) for each in self.owner_layouts]
        self.src, self.dst = self.sources[0], make_pool(False, layout)
        self.before = self.after = lambda pull: None
        self.pulls, self.released, self.done, self.gates = [], [], [], []
        self.num_connects = self.num_closed = self.num_offers = 0
        self.woken = threading.Event()
        self.start_owner("first life")
        rank = ReceivingRank(
            self.dst,
            layouts=[layout],
            config=self.config,
            host="loopback",
            transports=self.transports,
            clock=time.monotonic,
        )
        self.lost = []
        self.receiver = KVReceiver(
            rank,
            peers=lambda address: Client(self),
            other_ranks=[lambda other=other: other for other in other_ranks],
            on_rank_lost=self.lost.append,
            wake=self.woken.set,
        )

    def start_owner(self, incarnation):
        ranks = [
            RankSender(
                kv,
                layout=layout,
                host="loopback",
                config=self.owner_config,
                transports=self.transports,
                clock=time.monotonic,
            )
            for kv, layout in zip(self.sources, self.owner_layouts, strict=True)
        ]
        self.sender = KVSender(
            ranks,
            layouts=self.owner_layouts,
            incarnation=incarnation,
            worker="p",
            address="p:1",
            config=self.owner_config,
            backend=self.transports.backend,
            clock=time.monotonic,
        )

    def offer(self, block_ids=(3, 1, 2)):
        self.num_offers += 1
        request = GenerateRequest(
            request_id=f"r{self.num_offers}",
            model="m",
            prompt_token_ids=(1,),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
        )
        return self.sender.offer(
            request,
            blocks=[BlockRef(block_id=i, generation=7) for i in block_ids],
            block_hashes=[bytes([i]) for i in block_ids[:-1]],
            num_tokens=self.owner_layout.block_size * len(block_ids),
        )

    def start(self, handle, block_ids=None, first_block=0):
        if block_ids is None:
            block_ids = [15 - i for i in range(len(handle.blocks) - first_block)]
        self.receiver.start(handle, LAYOUT.block_size * first_block, block_ids)

    def wait(self, count=1, within_s=8.0):
        """The next `count` PullDone."""
        deadline = time.monotonic() + within_s
        self.done += self.receiver.poll()
        while len(self.done) < count:
            assert self.woken.wait(deadline - time.monotonic()), "no PullDone came"
            self.woken.clear()
            self.done += self.receiver.poll()
        taken, self.done = self.done[:count], self.done[count:]
        return taken

    def pull(self, handle, block_ids=None, first_block=0):
        self.start(handle, block_ids, first_block)
        return self.wait()[0]

    def fails(self, handle, error, match=""):
        """The pull ends with exactly this error, which keeps nothing alive."""
        done = self.pull(handle)
        assert type(done.error) is error, done.error
        assert match in str(done.error)
        assert done.error.__traceback__ is done.error.__context__ is done.error.__cause__ is None
        assert done.num_blocks == done.num_bytes == 0
        return done

    def works(self):
        """A pull of a fresh handle brings the right bytes."""
        self.dst.zero_()
        handle = self.offer((5, 0, 9))
        assert self.pull(handle, [4, 11, 2]).error is None
        assert torch.equal(self.dst[:, :, [4, 11, 2]], self.src[:, :, [5, 0, 9]])

    def no_lease(self, within_s=2.0):
        eventually(lambda: self.sender.poll(time.monotonic()) is not None and not self.num_leases())

    def num_leases(self):
        return self.sender.num_leases

    def close(self):
        self.receiver.close()
        self.sender.close()
        for gate in self.gates:
            gate.set()
        assert not self.receiver.poll(), "no PullDone was left over"


class Wrapped(LoopbackTransports):
    """`wrap` is put around the owner's end."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def join(self, offer, host, timeout_s):
        return self.wrap(super().join(offer, host, timeout_s))


class Faulty:
    """The owner's end of a channel with a fault in `send`, as long as `fault` has one."""

    def __init__(self, transport, fault):
        self.transport = transport
        self.fault = fault

    def send(self, tensor, timeout_s):
        fault = self.fault[0] if self.fault else None
        if fault is None or fault(self.transport, tensor) is not LOST:
            self.transport.send(tensor, timeout_s)

    def close(self):
        self.transport.close()


LOST = object()


def eventually(holds, within_s=3.0):
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def kv_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("kv-")]


@pytest.fixture
def make_rig():
    rigs = []

    def make(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
    eventually(lambda: not kv_threads())


@pytest.fixture
def rig(make_rig):
    return make_rig()


# What should happen


def test_the_right_bytes_in_the_right_blocks_and_no_others(rig):
    before = rig.dst.clone()
    handle = rig.offer((3, 1, 2))
    done = rig.pull(handle, [9, 0, 4])
    assert done.error is None
    assert (done.handle_id, done.request_id, done.attempt) == (handle.handle_id, "r1", 0)
    assert (done.num_blocks, done.num_bytes) == (3, 3 * BLOCK_BYTES)
    assert torch.equal(rig.dst[:, :, [9, 0, 4]], rig.src[:, :, [3, 1, 2]])
    others = [i for i in range(NUM_BLOCKS) if i not in (9, 0, 4)]
    assert torch.equal(rig.dst[:, :, others], before[:, :, others])
    rig.no_lease()
    assert rig.released == [(handle.handle_id, "received")]


@pytest.mark.parametrize("max_message_bytes", [1, BLOCK_BYTES, 3 * BLOCK_BYTES, 1 << 20])
@pytest.mark.parametrize("owners", [1, 1 << 20])
def test_any_size_of_messages_whatever_the_owner_would_choose(make_rig, max_message_bytes, owners):
    rig = make_rig(max_message_bytes=max_message_bytes, owner={"max_message_bytes": owners})
    for count in (1, 2, 7):
        handle = rig.offer(range(count))
        assert rig.pull(handle, range(8, 8 + count)).error is None
        assert torch.equal(rig.dst[:, :, 8 : 8 + count], rig.src[:, :, :count])


def test_only_what_is_missing_moves(rig):
    handle = rig.offer((3, 1, 2, 6))
    done = rig.pull(handle, [8, 7], first_block=2)
    assert (done.num_blocks, done.error) == (2, None)
    assert torch.equal(rig.dst[:, :, [8, 7]], rig.src[:, :, [2, 6]])
    assert rig.pulls[0].first_position == 2 * LAYOUT.block_size
    assert not rig.dst[:, :, :7].any()


def test_with_nothing_missing_only_the_lease_ends(rig):
    done = rig.pull(rig.offer(), [], first_block=3)
    assert (done.num_blocks, done.error) == (0, None)
    rig.no_lease()
    assert not rig.pulls
    assert not rig.num_connects


def test_pulls_of_one_owner_share_a_channel(rig):
    for _ in range(3):
        rig.works()
    assert rig.num_connects == 1
    assert [pull.transfer_id for pull in rig.pulls] == [1, 2, 3]


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_checksums_on_or_off(make_rig, here, there):
    rig = make_rig(verify_checksum=here, owner={"verify_checksum": there})
    if here and not there:
        rig.fails(rig.offer(), TransferError, "sends none")
    else:
        rig.works()


PLAIN = replace(LAYOUT, block_size=32, head_dim=6)
TILED = replace(PLAIN, inner_order="tiles16")


def reordered(pool, source, target):
    if source == target:
        return pool
    return tile(pool) if target is TILED else untile(pool)


@pytest.mark.parametrize("handle_lies", [False, True])
@pytest.mark.parametrize("here", [PLAIN, TILED], ids=["to plain", "to tiles"])
@pytest.mark.parametrize("there", [PLAIN, TILED], ids=["plain", "tiles"])
def test_blocks_arrive_in_the_readers_inner_order(make_rig, there, here, handle_lies):
    """Whatever a handle says of its owner's. The bytes on the way are in the order of both sides,
    or in plain order."""
    sent = []
    rig = make_rig(
        layout=here,
        owner_layout=there,
        wrap=lambda transport: Faulty(transport, [lambda _, message: sent.append(message.clone())]),
        max_message_bytes=2 * PLAIN.bytes_per_block,
    )
    handle, pulled = rig.offer((3, 1, 2)), [9, 0, 4]
    if handle_lies:
        handle = replace(handle, layouts=(PLAIN if there is TILED else TILED,))
    for _ in range(2):
        rig.dst.zero_()
        assert rig.pull(handle, pulled).error is None
        wanted = reordered(rig.src, there, here)
        assert torch.equal(rig.dst[:, :, pulled], wanted[:, :, [3, 1, 2]])
        others = [i for i in range(NUM_BLOCKS) if i not in pulled]
        assert not rig.dst[:, :, others].any()
        handle = rig.offer((3, 1, 2))
    if not handle_lies:
        moved = reordered(rig.src, there, there if here is there else PLAIN)
        assert torch.equal(torch.cat(sent[:2], dim=2), moved[:, :, [3, 1, 2]])
        assert len(sent) == 4


def test_many_pulls_from_several_owners_at_once(make_rig):
    rigs = [make_rig() for _ in range(3)]
    for rig in rigs:
        for i in range(NUM_BLOCKS):
            rig.start(rig.offer([i]), [NUM_BLOCKS - 1 - i])
    for rig in rigs:
        assert all(done.error is None for done in rig.wait(NUM_BLOCKS))
        assert torch.equal(rig.dst.flip(2), rig.src)
        rig.no_lease()


# Cancel and close


class Gate:
    """Holds pulls where the receive is posted and the owner has heard nothing."""

    def __init__(self, rig):
        self.open = threading.Event()
        self.reached = threading.Event()
        rig.gates.append(self.open)
        rig.before = self

    def __call__(self, pull):
        self.reached.set()
        self.open.wait(20)


def test_cancel_before_and_during_the_transfer(rig):
    gate = Gate(rig)
    running, queued = rig.offer((1,)), rig.offer((2,))
    rig.start(running, [5])
    rig.start(queued, [6])
    assert gate.reached.wait(2)
    rig.receiver.cancel(queued.request_id, queued.attempt + 1)
    rig.receiver.cancel(running.request_id, running.attempt)
    assert not rig.receiver.poll(), "neither another attempt nor a running pull ends"
    rig.receiver.cancel(queued.request_id, queued.attempt)
    (done,) = rig.wait()
    assert (done.handle_id, type(done.error)) == (queued.handle_id, AbortedError)
    gate.open.set()
    (done,) = rig.wait()
    assert (done.handle_id, done.error) == (running.handle_id, None)
    rig.receiver.cancel(queued.request_id, queued.attempt)
    rig.no_lease()
    assert dict(rig.released) == {running.handle_id: "received", queued.handle_id: "aborted"}
    assert not rig.receiver.poll(), "each ends once"
    assert len(rig.pulls) == 1


def test_close_ends_running_and_queued_pulls_at_once_and_tells_the_owner(make_rig):
    rig = make_rig(timeout_s=30.0)
    gate = Gate(rig)
    handles = [rig.offer((i,)) for i in range(4)]
    held = rig.offer((5,))
    rig.receiver.hold(held)
    for handle in handles:
        rig.start(handle, [handle.blocks[0].block_id])
    assert gate.reached.wait(2)
    started = time.monotonic()
    rig.receiver.close()
    assert time.monotonic() - started < 1.0
    assert [type(done.error) for done in rig.wait(4)] == [AbortedError] * 4
    assert {handle_id for handle_id, _ in rig.released} == {h.handle_id for h in handles}
    assert rig.num_closed == 1
    assert kv_threads() == ["kv-pull_0"], "only the call to the silent owner"
    gate.open.set()
    eventually(lambda: not kv_threads())


def test_nothing_starts_after_close(rig):
    handle = rig.offer()
    rig.receiver.close()
    assert type(rig.pull(handle).error) is AbortedError
    rig.receiver.hold(handle)
    rig.receiver.release(handle, "unwanted")
    rig.receiver.close()
    assert not kv_threads()


def test_closing_the_sender_ends_a_pull_in_progress(make_rig):
    rig = make_rig(timeout_s=30.0)
    fault = []
    rig.transports.wrap = lambda transport: Faulty(transport, fault)
    sending, gate = threading.Event(), threading.Event()
    fault.append(lambda *_: (sending.set(), gate.wait(20)))
    rig.start(rig.offer())
    assert sending.wait(2)
    started = time.monotonic()
    rig.sender.close()
    (done,) = rig.wait()
    assert time.monotonic() - started < 3.0
    assert type(done.error) is TransferError
    gate.set()
    rig.no_lease()


# What is refused


STALE = {
    "block": (
        lambda h: {"blocks": (BlockRef(block_id=9, generation=7), *h.blocks[1:])},
        "block id",
    ),
    "generation": (
        lambda h: {"blocks": (*h.blocks[:-1], replace(h.blocks[-1], generation=6))},
        "generation",
    ),
    "more blocks": (
        lambda h: {"blocks": (*h.blocks, h.blocks[0]), "num_tokens": h.num_tokens + 4},
        "block id or generation",
    ),
    "attempt": (lambda h: {"attempt": 1}, "another request or attempt"),
    "request": (lambda h: {"request_id": "other"}, "another request or attempt"),
    "hash": (lambda h: {"block_hashes": (b"x", *h.block_hashes[1:])}, "block hash"),
    "handle": (lambda h: {"handle_id": "other"}, "unknown handle"),
}


@pytest.mark.parametrize("field", STALE)
def test_a_stale_handle_is_refused_counted_and_the_next_pull_works(make_rig, field):
    rig = make_rig(timeout_s=30.0)
    change, reason = STALE[field]
    handle = rig.offer()
    rig.works()
    started = time.monotonic()
    rig.fails(replace(handle, **change(handle)), StaleHandleError, reason)
    assert time.monotonic() - started < 1.0, "the posted receive fails with the refusal"
    assert [reason in name for name in rig.sender.refusals] == [True]
    assert list(rig.sender.refusals.values()) == [1]
    assert not rig.dst[:, :, 12:].any(), "nothing was written"
    rig.works()
    assert rig.num_connects == 2, "a fresh channel"


def test_a_released_or_expired_handle_is_refused(make_rig):
    rig = make_rig(lease_s=0.2)
    released, expired = rig.offer(), rig.offer()
    rig.sender.release(released.handle_id)
    time.sleep(0.25)
    rig.fails(expired, StaleHandleError, "expired")
    rig.fails(released, StaleHandleError, "unknown handle")
    assert rig.sender.refusals == {"expired": 1, "unknown handle": 1}
    rig.works()


def test_another_layout_is_refused_with_both_values(make_rig):
    rig = make_rig(layout=replace(LAYOUT, head_dim=5))
    rig.fails(rig.offer(), HandshakeRefusedError, "head_dim differs: 3 here, 5 there")
    rig.no_lease()
    rig.fails(rig.offer(), HandshakeRefusedError)
    assert not rig.pulls


def test_an_impossible_inner_order_is_refused_with_the_reason(make_rig):
    rig = make_rig(owner_layout=replace(LAYOUT, inner_order="tiles16"))
    rig.fails(rig.offer(), HandshakeRefusedError, "not float32, 4 and 3 numbers")
    rig.no_lease()
    assert not rig.pulls


def test_another_transport_is_refused(rig):
    rig.sender.close()
    rig.transports.backend = "nccl"
    sender, rig.transports = rig.sender, LoopbackTransports()
    rig.start_owner("first life")
    del sender
    rig.fails(rig.offer(), HandshakeRefusedError, "transport nccl there, loopback here")


def test_a_restarted_owner_honours_nothing_old_and_serves_what_is_new(make_rig):
    rig = make_rig(timeout_s=30.0)
    rig.works()
    old, other = rig.offer(), rig.offer()
    rig.receiver.hold(other)
    rig.sender.close()
    rig.start_owner("second life")
    started = time.monotonic()
    rig.start(old)
    rig.start(rig.offer(), [1, 2, 3])
    results = {done.request_id: done.error for done in rig.wait(2)}
    assert results["r4"] is None
    assert isinstance(results[old.request_id], TransferError)
    rig.fails(other, HandshakeRefusedError, "restarted")
    assert time.monotonic() - started < 2.0
    rig.works()


# Peers that retire


def test_an_idle_peer_ends_with_its_threads(make_rig, monkeypatch):
    monkeypatch.setattr(kv_transfer.receiver, "IDLE_S", 0.05)
    rig = make_rig()
    held = rig.offer()
    rig.works()
    rig.receiver.hold(held)
    time.sleep(0.2)
    assert sorted(set(kv_threads())) == ["kv-lease", "kv-pull_0", "kv-receive"], "a lease is held"
    rig.receiver.release(held, "unwanted")
    eventually(lambda: not kv_threads())
    assert rig.num_closed == 1
    rig.works()


def test_no_pull_is_lost_to_a_peer_that_is_just_retiring(make_rig, monkeypatch):
    monkeypatch.setattr(kv_transfer.receiver, "IDLE_S", 0.0005)
    rig = make_rig()
    for i in range(150):
        time.sleep((i % 7) * 0.0003)
        handle = rig.offer((i % NUM_BLOCKS,))
        rig.receiver.hold(handle)
        assert rig.pull(handle, [i % NUM_BLOCKS]).error is None
        rig.receiver.release(rig.offer(), "unwanted")
    assert rig.num_closed > 3, "or the test shows nothing"
    rig.no_lease()


def test_a_peer_about_to_retire_still_ends_when_the_receiver_closes(make_rig, monkeypatch):
    """A lease is held, so it may not retire; that must not undo the close it has raced with."""
    monkeypatch.setattr(kv_transfer.receiver, "IDLE_S", 0.01)
    rig = make_rig(timeout_s=3.0)
    asked, may_go_on, retire = threading.Event(), threading.Event(), rig.receiver.retire

    def slow_retire(peer):
        asked.set()
        may_go_on.wait(5)
        retire(peer)

    rig.receiver.retire = slow_retire
    rig.receiver.hold(rig.offer())
    assert asked.wait(2)
    closing = threading.Thread(target=rig.receiver.close)
    closing.start()
    time.sleep(0.1)
    may_go_on.set()
    closing.join(1.0)
    assert not closing.is_alive()
    assert not kv_threads()


def test_a_peer_keeps_its_channel_between_pulls(rig):
    """Words about leases wake its threads; that must not look like a minute without work."""
    for _ in range(5):
        rig.works()
        rig.receiver.release(rig.offer(), "unwanted")
        time.sleep(0.02)
    assert rig.num_connects == 1


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_an_unused_channel_is_closed_and_replaced(make_rig, monkeypatch, side):
    rig = make_rig()
    rig.works()
    held = rig.offer()
    rig.receiver.hold(held)
    if side == "owner":
        monkeypatch.setattr(kv_transfer.sender, "CHANNEL_IDLE_S", 0.0)
        time.sleep(0.01)
        rig.sender.poll(time.monotonic())
        rig.fails(rig.offer(), TransferError, "KV channel")
    else:
        monkeypatch.setattr(kv_transfer.link, "IDLE_S", 0.01)
        time.sleep(0.05)
    rig.works()
    assert rig.num_connects == 2


# Several ranks of the owner


def test_each_of_several_pieces_has_its_next_receive_posted_soon(make_rig, monkeypatch):
    """Two owner ranks with half of the heads each. Were their pieces received one after the other,
    the second one would wait for the first one's whole time, which NCCL's manners forbid."""
    monkeypatch.setattr(kv_transfer.loopback, "POST_GRACE_S", 0.1)
    joined = []

    def first_is_slow(transport):
        joined.append(transport)
        return Faulty(transport, [lambda *_: time.sleep(0.02)] if len(joined) == 1 else [])

    halves = [replace(LAYOUT, num_kv_heads=1, first_kv_head=head) for head in range(2)]
    rig = make_rig(owner_layouts=halves, wrap=first_is_slow, max_message_bytes=1)
    handle = rig.offer(range(12))
    assert rig.pull(handle, range(12)).error is None
    for head, src in enumerate(rig.sources):
        assert torch.equal(rig.dst[:, :, :12, head : head + 1], src[:, :, :12])
    rig.no_lease()


# Other ranks of the worker


class OtherRank:
    """Of the worker that pulls. `ends` is what becomes of its part."""

    def __init__(self, ends=None):
        self.ends = ends
        self.pulled, self.num_drops, self.is_closed = [], 0, False
        self.may_end = threading.Event()
        self.may_end.set()

    def pull(self, wanted, deadline):
        self.pulled.append(wanted)
        assert self.may_end.wait(5)
        if self.ends is not None:
            raise self.ends

    def drop(self):
        self.num_drops += 1
        self.may_end.set()

    def close(self):
        self.is_closed = True


def test_a_pull_is_done_when_all_ranks_have_their_part(make_rig):
    other = OtherRank()
    other.may_end.clear()
    rig = make_rig(other_ranks=[other, OtherRank()])
    handle = rig.offer()
    rig.start(handle, [9, 0, 4])
    eventually(lambda: torch.equal(rig.dst[:, :, [9, 0, 4]], rig.src[:, :, [3, 1, 2]]))
    assert not rig.woken.wait(0.1), "one rank is not there yet"
    other.may_end.set()
    assert rig.wait()[0].error is None
    assert [wanted.block_ids for wanted in other.pulled] == [(9, 0, 4)]
    rig.receiver.close()
    assert other.is_closed


def test_one_ranks_failure_ends_it_on_all(make_rig):
    failing, slow = OtherRank(TransferError("its channel broke")), OtherRank()
    slow.may_end.clear()
    rig = make_rig(other_ranks=[slow, failing])
    threading.Timer(0.2, slow.may_end.set).start()
    rig.fails(rig.offer(), TransferError, "its channel broke")
    assert (slow.num_drops, failing.num_drops) == (1, 0), "who has failed writes no more"
    failing.ends = None
    rig.works()


def test_blocks_are_never_free_again_when_a_rank_may_still_write_into_them(make_rig):
    rig = make_rig(other_ranks=[OtherRank(RankLostError("rank 1 did not answer"))])
    rig.start(rig.offer())
    eventually(lambda: rig.lost == ["rank 1 did not answer"])
    assert rig.receiver.poll() == []


# Transport faults


def faulty_rig(make_rig, fault, **options):
    faults = [fault]
    rig = make_rig(wrap=lambda transport: Faulty(transport, faults), **options)
    rig.heal = faults.clear
    return rig


def flip(transport, tensor):
    tensor.view(-1).view(torch.uint8)[5] ^= 4


def lose(transport, tensor):
    return LOST


def fail(transport, tensor):
    transport.close()
    raise TransferError("the wire broke")


def crash(transport, tensor):
    raise RuntimeError("a bug")


def fail_second_message():
    seen = []

    def fault(transport, tensor):
        seen.append(tensor)
        if len(seen) == 2:
            fail(transport, tensor)

    return fault


@pytest.mark.parametrize(
    ("fault", "error", "within_s"),
    [
        (flip, TransferError, 0.5),
        (lose, TransferError, 1.5),
        (fail, TransferError, 0.5),
        (fail_second_message(), TransferError, 0.5),
        (crash, InternalError, 0.5),
    ],
    ids=["corrupted", "lost", "failed", "second message failed", "crashed"],
)
def test_a_faulty_send_never_reports_success(make_rig, caplog, fault, error, within_s):
    rig = faulty_rig(make_rig, fault, timeout_s=0.8)
    done = rig.fails(rig.offer(), error, "checksum" if fault is flip else "")
    assert done.seconds < within_s
    rig.heal()
    rig.works()
    assert rig.num_connects == 2, "the channel was not used again"
    rig.no_lease()


def test_without_checksums_corruption_passes(make_rig):
    """Says what the switch costs, and that the test above tests the checksum."""
    rig = faulty_rig(make_rig, flip, verify_checksum=False)
    assert rig.pull(rig.offer()).error is None


def test_an_owner_that_refuses_without_closing_its_end(make_rig):
    """Its gRPC server answered and not the sender: nobody else would end the posted receive."""
    rig = make_rig(timeout_s=30.0)
    rig.works()

    def busy(pull):
        raise TransferError("no thread is free")

    rig.before = busy
    assert rig.fails(rig.offer(), TransferError, "no thread is free").seconds < 1.0
    rig.before = lambda pull: None
    rig.works()


def test_an_owner_that_never_joins(make_rig, monkeypatch):
    monkeypatch.setattr(kv_transfer.link, "SETUP_S", 0.1)
    rig = make_rig()
    monkeypatch.setattr(rig.transports, "join", lambda *_: 1 / 0)
    rig.fails(rig.offer(), TransferError, "timed out")
    monkeypatch.undo()
    rig.works()


def test_a_late_reply_fails_its_own_pull_and_delays_no_other(make_rig):
    rig = make_rig(timeout_s=0.4)
    late = threading.Event()
    rig.after = lambda pull: late.wait(20)
    rig.fails(rig.offer(), TransferError, "no word")
    rig.after = lambda pull: None
    started = time.monotonic()
    rig.works()
    assert time.monotonic() - started < 0.4
    late.set()
    rig.works()


def test_a_silent_owner_fails_the_pull_in_time_and_late_bytes_go_nowhere(make_rig):
    rig = make_rig(timeout_s=0.4)
    gate = Gate(rig)
    done = rig.fails(rig.offer(), TransferError)
    assert 0.35 < done.seconds < 1.0
    rig.before = lambda pull: None
    handle = rig.offer((4,))
    assert rig.pull(handle, [0]).error is None
    image = rig.dst.clone()
    gate.open.set()
    eventually(lambda: len([n for n in kv_threads() if n.startswith("kv-pull")]) == 1)
    assert torch.equal(rig.dst, image)
    rig.works()


def test_other_leases_are_renewed_while_a_transfer_is_stuck(make_rig):
    rig = make_rig(lease_s=0.3, timeout_s=30.0)
    gate = Gate(rig)
    waiting, unwanted = rig.offer(), rig.offer()
    rig.receiver.hold(waiting)
    rig.receiver.hold(unwanted)
    rig.start(rig.offer())
    assert gate.reached.wait(2)
    time.sleep(0.8)
    assert not rig.sender.poll(time.monotonic())
    rig.receiver.release(unwanted, "unwanted")
    eventually(lambda: [e.reason for e in rig.sender.poll(time.monotonic())] == ["unwanted"])
    gate.open.set()
    assert rig.wait()[0].error is None
    assert rig.pull(waiting).error is None


def test_control_calls_never_wait_behind_pulls(make_rig):
    sending, gate = threading.Event(), threading.Event()
    rig = faulty_rig(make_rig, lambda *_: (sending.set(), gate.wait(20)), timeout_s=30.0)
    handle, other = rig.offer(), rig.offer()
    rig.start(handle)
    assert sending.wait(2)
    rig.heal()
    started = time.monotonic()
    assert rig.sender.renew((handle.handle_id, "none")) == ("none",)
    rig.sender.release(other.handle_id)
    rig.sender.abort_request(handle.request_id, handle.attempt)
    assert [ended.handle_id for ended in rig.sender.poll(started)] == [other.handle_id]
    rig.offer()
    assert time.monotonic() - started < 0.1
    assert rig.sender.num_leases == 2, "aborted, but read from until the transfer ends"
    gate.set()
    assert rig.wait()[0].error is None


# Leases


def test_a_lease_lives_as_long_as_it_is_held(make_rig):
    rig = make_rig(lease_s=0.3)
    handle, forgotten = rig.offer(), rig.offer()
    rig.receiver.hold(handle)
    time.sleep(0.5)
    assert [e.handle_id for e in rig.sender.poll(time.monotonic())] == [forgotten.handle_id]
    time.sleep(0.5)
    assert not rig.sender.poll(time.monotonic())
    assert rig.pull(handle).error is None
    rig.no_lease()


def test_the_owners_shorter_lease_sets_the_pace(make_rig):
    rig = make_rig(lease_s=60.0, owner={"lease_s": 0.3})
    handle = rig.offer()
    rig.receiver.hold(handle)
    time.sleep(0.6)
    assert rig.pull(handle).error is None


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
def test_a_senseless_lease_in_a_handle_floods_nobody(rig, lease_s):
    renewals, renew = [], rig.sender.renew
    rig.sender.renew = lambda handle_ids: (renewals.append(handle_ids), renew(handle_ids))[1]
    rig.receiver.hold(replace(rig.offer(), lease_s=lease_s))
    time.sleep(0.3)
    assert len(renewals) <= 16


def test_the_lease_ends_when_the_reader_is_gone(make_rig):
    rig = make_rig(lease_s=0.2)
    handle = rig.offer()
    rig.receiver.hold(handle)
    rig.receiver.close()
    time.sleep(0.25)
    (ended,) = rig.sender.poll(time.monotonic())
    assert (ended.block_ids, ended.reason) == ((3, 1, 2), "expired")


def test_a_lease_that_is_over_is_no_longer_renewed(make_rig, caplog):
    rig = make_rig(lease_s=0.15)
    handle = rig.offer()
    rig.receiver.hold(handle)
    rig.sender.release(handle.handle_id)
    eventually(lambda: "1 leases had ended" in caplog.text)
    caplog.clear()
    time.sleep(0.2)
    assert "had ended" not in caplog.text
    rig.fails(handle, StaleHandleError, "unknown handle")


# The owner's side, called by hand


@pytest.fixture
def channel(rig):
    """The receiver's end of an open channel, and the pull that fits it."""
    listener = rig.transports.listen("me.1", "loopback")
    rig.sender.connect(
        ChannelOffer(
            source=0,
            channel_id="me.1",
            backend="loopback",
            store_host="loopback",
            store_port=0,
            layout=LAYOUT,
            incarnation="first life",
            max_message_bytes=1 << 20,
        )
    )
    handle = rig.offer((3,))
    pull = PullRequest(
        handle_id=handle.handle_id,
        request_id=handle.request_id,
        attempt=handle.attempt,
        incarnation=handle.incarnation,
        channel_id="me.1",
        transfer_id=1,
        first_position=0,
        blocks=handle.blocks,
        block_hashes=handle.block_hashes,
    )
    return listener.accept(2.0), pull


def message():
    return torch.zeros(LAYOUT.num_layers, 2, 1, 2, 4, 3)


def test_a_transfer_is_never_run_twice(rig, channel):
    transport, pull = channel
    transport.post_recv(message())
    assert len(rig.sender.pull(pull)) == 1
    pending = transport.post_recv(message())
    with pytest.raises(TransferError, match="before"):
        rig.sender.pull(pull)
    with pytest.raises(TransferError):
        pending.wait(0.1)
    with pytest.raises(TransferError, match="unknown"):
        rig.sender.pull(replace(pull, transfer_id=2))


def test_a_pull_from_another_life_is_refused(rig, channel):
    _, pull = channel
    with pytest.raises(StaleHandleError, match="incarnation"):
        rig.sender.pull(replace(pull, incarnation="before"))
    assert rig.sender.refusals == {"another incarnation": 1}


def test_a_send_without_a_posted_receive_fails_and_the_lease_is_free_again(rig, channel):
    _, pull = channel
    with pytest.raises(TransferError, match="no receive"):
        rig.sender.pull(pull)
    rig.sender.release(pull.handle_id)
    assert len(rig.sender.poll(time.monotonic())) == 1


def test_one_transfer_at_a_time_on_a_channel(rig, channel):
    """A second one cannot come from a receiver that still waits for the first."""
    _, pull = channel
    errors = []

    def first():
        try:
            rig.sender.pull(pull)
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=first)  # waits for a receive to be posted
    thread.start()
    time.sleep(0.05)
    with pytest.raises(TransferError, match="in progress"):
        rig.sender.pull(replace(pull, transfer_id=2))
    thread.join(2)
    assert len(errors) == 1


def test_a_new_channel_replaces_the_receivers_old_one(rig, channel):
    transport, _ = channel
    pending = transport.post_recv(message())
    rig.transports.listen("me.2", "loopback")
    rig.sender.connect(
        ChannelOffer(
            source=0,
            channel_id="me.2",
            backend="loopback",
            store_host="loopback",
            store_port=0,
            layout=LAYOUT,
            incarnation="first life",
            max_message_bytes=1 << 20,
        )
    )
    started = time.monotonic()
    with pytest.raises(TransferError):
        pending.wait(5.0)
    assert time.monotonic() - started < 1.0, "closed, not timed out"
