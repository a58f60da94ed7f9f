"""KV between two real processes: gloo for the bytes, gRPC for the words, SIGKILL and SIGSTOP.

Run as a script, this file is the other process: the owner of blocks or their reader. It takes
commands as JSON lines on stdin, answers on stdout, and ends when stdin does.
"""

import asyncio
import base64
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import grpc
import psutil
import pytest
import torch

from core.config import TransferConfig
from core.errors import AbortedError, StaleHandleError, TransferError
from core.kv import BlockRef, ChannelOffer, KVLayout
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from cpu_kernels.kv_order import tile
from kv_transfer.distributed import DistributedTransports
from kv_transfer.link import ReceivingRank
from kv_transfer.peer_client import GrpcPeerClient
from kv_transfer.rank_sender import RankSender
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import CHANNEL_IDLE_S, KVSender
from prefill_workers.service import KVPeerServicer
from protocol.convert import handle_from_proto, handle_to_proto
from protocol.worker_pb2 import KVHandle as HandleProto
from protocol.worker_pb2_grpc import add_KVPeerServicer_to_server

HOST = "127.0.0.1"
NUM_BLOCKS = 24
ODD = {"num_layers": 3, "num_kv_heads": 3, "block_size": 5, "head_dim": 7}

TILEABLE = {"num_layers": 3, "num_kv_heads": 3, "block_size": 32, "head_dim": 8}


def make_layout(dtype="float32", inner_order=None):
    sizes = ODD if inner_order is None else {**TILEABLE, "inner_order": inner_order}
    if dtype == "int8":
        sizes = {**sizes, "head_dim": 8}  # a scale is aligned
    return KVLayout(model="m", dtype=dtype, first_layer=0, **sizes)


def make_pool(layout, seed):
    """Random bits, the same in every process, of one meaning in any order; zeros for seed None."""
    dtype = getattr(torch, layout.dtype)
    shape = (3, 2, NUM_BLOCKS, 3, layout.block_size, layout.row_bytes)
    if seed is None:
        return torch.zeros(shape, dtype=torch.uint8).view(dtype)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**8, shape, generator=generator, dtype=torch.uint8)
    return tile(bits.view(dtype)) if layout.inner_order == "tiles16" else bits.view(dtype)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


class Hooked:
    """gloo, with a hook before each send and after it."""

    backend = "gloo"

    def __init__(self):
        self._gloo = DistributedTransports("gloo")
        self.before_send = lambda: None
        self.sending = threading.Event()

    def listen(self, channel_id, host):
        return self._gloo.listen(channel_id, host)

    def join(self, offer, host, timeout_s):
        return HookedTransport(self, self._gloo.join(offer, host, timeout_s))


class HookedTransport:
    def __init__(self, hooks, transport):
        self._hooks = hooks
        self._transport = transport

    def send(self, tensor, timeout_s):
        self._hooks.before_send()
        self._transport.send(tensor, timeout_s)

    def close(self):
        self._transport.close()


class Owner:
    """A sender behind its gRPC service, on a thread of its own."""

    def __init__(self, dtype="float32", inner_order=None, **config):
        self.hooks = Hooked()
        self.num_ended = self.num_offers = 0
        self.pulls = queue.Queue()
        """(error, seconds) of each pull, as the owner saw it."""
        self._config = TransferConfig(verify_checksum=True, **config)
        self._layout = make_layout(dtype, inner_order)
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self):
        server = grpc.aio.server()
        self.address = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
        rank = RankSender(
            make_pool(self._layout, seed=1),
            layout=self._layout,
            host=HOST,
            config=self._config,
            transports=self.hooks,
            clock=time.monotonic,
        )
        self.sender = KVSender(
            [rank],
            layouts=[self._layout],
            incarnation=str(os.getpid()),
            worker="p",
            address=self.address,
            config=self._config,
            backend=self.hooks.backend,
            clock=time.monotonic,
        )
        servicer = KVPeerServicer(self)
        add_KVPeerServicer_to_server(servicer, server)
        await server.start()
        self._ready.set()
        while not self._stop.is_set():
            await asyncio.sleep(0.02)
            self.num_ended += len(self.sender.poll(time.monotonic()))
        await server.stop(None)
        servicer.close()

    # What the servicer calls: the sender, with a look at its pulls.

    def connect(self, offer):
        self.sender.connect(offer)

    def renew(self, handle_ids):
        return self.sender.renew(handle_ids)

    def release(self, handle_id, reason):
        self.sender.release(handle_id, reason)

    def pull(self, pull):
        started, error = time.monotonic(), None
        try:
            return self.sender.pull(pull)
        except TransferError as failure:
            error = failure
            raise
        finally:
            self.pulls.put((error, time.monotonic() - started))

    def offer(self, block_ids):
        self.num_offers += 1
        request = GenerateRequest(
            request_id=f"r{self.num_offers}",
            model="m",
            prompt_token_ids=(1,),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
        )
        return self.sender.offer(
            request,
            blocks=[BlockRef(block_id=i, generation=1) for i in block_ids],
            block_hashes=[bytes([i]) for i in block_ids],
            num_tokens=self._layout.block_size * len(block_ids),
        )

    def freeze_at(self, count):
        """SIGSTOP this process before the count-th send from now."""
        left = iter(range(count - 1, -1, -1))

        def hook():
            if next(left, None) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.1)  # the other threads stop first

        self.hooks.before_send = hook

    def drop_idle_channels(self):
        self.sender.poll(time.monotonic() + 2 * CHANNEL_IDLE_S)

    def close(self):
        self._stop.set()
        self._thread.join(10)
        self.sender.close()


class Reader:
    def __init__(self, dtype="float32", inner_order=None, num_message_blocks=2, **config):
        self.layout = make_layout(dtype, inner_order)
        self.dst = make_pool(self.layout, seed=None)
        self.src = make_pool(self.layout, seed=1)
        config = TransferConfig(
            verify_checksum=True,
            max_message_bytes=num_message_blocks * self.layout.bytes_per_block,
            **config,
        )
        self._woken = threading.Event()
        self._done = []
        rank = ReceivingRank(
            self.dst,
            layouts=[self.layout],
            config=config,
            host=HOST,
            transports=DistributedTransports("gloo"),
            clock=time.monotonic,
        )
        self.receiver = KVReceiver(
            rank,
            peers=lambda address: GrpcPeerClient(address, config.timeout_s),
            wake=self._woken.set,
        )

    def start(self, handle):
        self.receiver.start(handle, 0, range(len(handle.blocks)))

    def wait(self, within_s=20.0):
        deadline = time.monotonic() + within_s
        self._done += self.receiver.poll()
        while not self._done:
            assert self._woken.wait(max(0.0, deadline - time.monotonic())), "no PullDone came"
            self._woken.clear()
            self._done += self.receiver.poll()
        return self._done.pop(0)

    def pull(self, handle):
        self.start(handle)
        return self.wait()

    def gets(self, handle):
        self.dst.zero_()
        assert self.pull(handle).error is None
        block_ids = [block.block_id for block in handle.blocks]
        here = self.dst[:, :, : len(block_ids)]
        assert torch.equal(as_bytes(here), as_bytes(self.src[:, :, block_ids]))
        assert not as_bytes(self.dst[:, :, len(block_ids) :]).any()

    def close(self):
        self.receiver.close()


def to_text(handle):
    return base64.b64encode(handle_to_proto(handle).SerializeToString()).decode()


def from_text(text):
    return handle_from_proto(HandleProto.FromString(base64.b64decode(text)))


def other_process(role, options):
    """The script."""
    part = {"owner": Owner, "reader": Reader}[role](**options)
    commands = {
        "offer": lambda block_ids: to_text(part.offer(block_ids)),
        "freeze_at": lambda count: part.freeze_at(count),
        "num_leases": lambda: part.sender.num_leases,
        "refusals": lambda: part.sender.refusals,
        "drop_idle_channels": lambda: part.drop_idle_channels(),
        "start": lambda text: part.start(from_text(text)),
    }
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(commands[name](*arguments)), flush=True)
    part.close()


class Child:
    """The other process, from here."""

    def __init__(self, role, **options):
        self._process = subprocess.Popen(
            [sys.executable, __file__, role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ps = psutil.Process(self._process.pid)
        self._ready = False

    def wait_until_ready(self):
        if not self._ready:
            assert json.loads(self._process.stdout.readline()) == "ready"
            self._ready = True

    def __call__(self, *command):
        self.wait_until_ready()
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def offer(self, block_ids=range(7)):
        return from_text(self("offer", list(block_ids)))

    def is_frozen(self):
        return self.ps.status() == psutil.STATUS_STOPPED

    def kill(self):
        """Frozen or not, dead or not."""
        with self._process:
            self._process.kill()


@pytest.fixture(scope="module")
def children():
    """Owners for several tests and owners to be killed, started side by side: torch takes long to
    import."""
    victims = [Child("owner") for _ in range(4)]
    owners = {
        "float32": Child("owner", timeout_s=2.0, lease_s=1.0),
        "bfloat16": Child("owner", dtype="bfloat16"),
        "int8": Child("owner", dtype="int8"),
        "victims": list(victims),
        "reader": Child("reader", num_message_blocks=1),
    }
    all_children = [owners[name] for name in ("float32", "bfloat16", "int8", "reader")] + victims
    yield owners
    for child in all_children:
        child.kill()


@pytest.fixture
def make_reader():
    readers = []

    def make(**options):
        readers.append(Reader(**options))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.fixture
def make_owner():
    owners = []

    def make(**options):
        owners.append(Owner(**options))
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()


@pytest.fixture
def victim(children):
    return children["victims"].pop() if children["victims"] else pytest.fail("too few victims")


def eventually(holds, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("num_message_blocks", [1, 5, 100])
def test_every_byte_arrives(children, make_reader, dtype, num_message_blocks):
    owner, reader = children[dtype], make_reader(dtype=dtype, num_message_blocks=num_message_blocks)
    for block_ids in ([3], [4, 0, 23, 7, 8, 1, 2], range(NUM_BLOCKS)):
        reader.gets(owner.offer(block_ids))
    eventually(lambda: owner("num_leases") == 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("here", ["plain", "tiles16"])
@pytest.mark.parametrize("there", ["plain", "tiles16"])
def test_every_number_arrives_where_the_readers_inner_order_has_it(
    make_owner, make_reader, there, here, dtype
):
    owner = make_owner(dtype=dtype, inner_order=there)
    reader = make_reader(dtype=dtype, inner_order=here)
    for block_ids in ([3], [4, 0, 23, 7, 8, 1, 2], range(NUM_BLOCKS)):
        reader.gets(owner.offer(block_ids))
    eventually(lambda: owner.sender.num_leases == 0)


def test_nothing_listens_on_all_interfaces(children, make_reader):
    owner, reader = children["bfloat16"], make_reader(dtype="bfloat16")
    reader.gets(owner.offer())
    for process in (psutil.Process(), owner.ps):
        listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"]
        assert listening, "a channel is open"
        assert set(listening) <= {HOST, f"::ffff:{HOST}"}, "the latter is gRPC"


def test_a_refusal_fails_the_posted_receive_at_once(children, make_reader):
    owner, reader = children["bfloat16"], make_reader(dtype="bfloat16")
    reader.gets(owner.offer())
    handle = owner.offer()
    owner_blocks = (*handle.blocks[1:], handle.blocks[0])
    forged = type(handle)(**{**fields_of(handle), "blocks": owner_blocks})
    started = time.monotonic()
    assert type(reader.pull(forged).error) is StaleHandleError
    assert time.monotonic() - started < 1.0
    assert owner("refusals") == {"block id or generation": 1}
    assert not as_bytes(reader.dst[:, :, 7:]).any()
    reader.gets(owner.offer())


def fields_of(value):
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_an_owner_killed_before_the_channel_is_built(victim, make_reader):
    handle, reader = victim.offer(), make_reader()
    victim.kill()
    done = reader.pull(handle)
    assert isinstance(done.error, TransferError)
    assert done.seconds < 3.0


@pytest.mark.parametrize("at_message", [1, 2])
def test_an_owner_killed_while_the_receive_is_posted(victim, make_reader, at_message):
    reader = make_reader()
    reader.gets(victim.offer())
    victim("freeze_at", at_message)
    reader.start(victim.offer())
    eventually(victim.is_frozen)
    time.sleep(0.1)
    started = time.monotonic()
    victim.kill()
    assert isinstance(reader.wait().error, TransferError)
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("when", ["before the channel", "amid the transfer"])
def test_a_frozen_owner_fails_the_pull_in_time_and_does_no_harm_when_it_thaws(
    children, make_reader, when
):
    owner, reader = children["float32"], make_reader(timeout_s=1.0)
    if when == "amid the transfer":
        reader.gets(owner.offer())
        owner("freeze_at", 3)
        handle = owner.offer()
    else:
        handle = owner.offer()
        owner.ps.suspend()
    reader.start(handle)
    done = reader.wait()
    assert isinstance(done.error, TransferError)
    assert 0.9 < done.seconds < 1.8
    image = as_bytes(reader.dst).clone()
    owner.ps.resume()
    time.sleep(0.3)
    assert torch.equal(as_bytes(reader.dst), image)
    reader.gets(owner.offer())
    assert isinstance(reader.pull(handle).error, TransferError), "refused or expired"
    reader.gets(owner.offer())
    eventually(lambda: owner("num_leases") == 0)


@pytest.mark.parametrize("fate", ["frozen", "killed"])
def test_a_reader_lost_amid_the_transfer_costs_its_lease_and_no_more(
    children, make_owner, make_reader, fate
):
    owner, child = make_owner(timeout_s=1.5, lease_s=1.0), children["reader"]
    child.wait_until_ready()
    messages = iter(range(100))

    def freeze_reader():
        if next(messages) == 2:
            child.ps.suspend()
            threading.Timer(0.2, child.kill if fate == "killed" else lambda: None).start()

    owner.hooks.before_send = freeze_reader
    child("start", to_text(owner.offer(range(NUM_BLOCKS))))
    error, seconds = owner.pulls.get(timeout=10)
    assert type(error) is TransferError
    assert seconds < (1.2 if fate == "killed" else 2.2)
    eventually(lambda: owner.num_ended == 1 and owner.sender.num_leases == 0)
    owner.hooks.before_send = lambda: None
    make_reader().gets(owner.offer(range(3)))
    if fate == "frozen":
        child.ps.resume()


@pytest.fixture
def channel():
    """Both ends of a gloo channel, in this process."""
    factory, ends = DistributedTransports("gloo"), []
    listener = factory.listen("pair", HOST)
    offer = offer_at(listener.meeting.port, 0)
    joining = threading.Thread(target=lambda: ends.append(factory.join(offer, HOST, 5.0)))
    joining.start()
    ends.append(listener.accept(5.0))
    joining.join()
    receiver, sender = sorted(ends, key=lambda end: end._peer)  # by the other end's rank
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.mark.parametrize("closing", ["own end", "other end"])
@pytest.mark.parametrize("operation", ["recv", "send"])
def test_close_ends_pending_operations_of_both_ends_at_once(channel, operation, closing):
    """And what a closed end had posted is never written: its memory may have a new use."""
    sender, receiver = channel
    outcome = queue.Queue()

    def wait():
        started = time.monotonic()
        try:
            if operation == "recv":
                receiver.post_recv(memory).wait(10.0)
            else:
                sender.send(memory, 10.0)
        except TransferError:
            outcome.put(time.monotonic() - started)

    memory = torch.zeros(1 << 22)
    own, other = (receiver, sender) if operation == "recv" else (sender, receiver)
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    (own if closing == "own end" else other).close()
    assert outcome.get(timeout=2) < 1.0
    waiting.join()
    with pytest.raises(TransferError):
        sender.send(torch.ones(1 << 22), 1.0)
    with pytest.raises(TransferError):
        receiver.post_recv(torch.ones(1)).wait(1.0)
    assert not memory.any()


def test_a_receive_that_nobody_waits_for_is_not_written_after_close(channel):
    sender, receiver = channel
    memory = torch.zeros(1000)
    pending = receiver.post_recv(memory)
    receiver.close()
    with pytest.raises(TransferError):
        sender.send(torch.ones(1000), 1.0)
    assert not memory.any()
    del pending


def offer_at(port, number):
    return ChannelOffer(
        channel_id=f"nobody.{number}",
        source=0,
        backend="gloo",
        store_host=HOST,
        store_port=port,
        layout=make_layout(),
        incarnation=str(os.getpid()),
        max_message_bytes=1,
    )


def offer_without_coming(owner):
    """Nobody listens; or the store is there but nobody joins; or it goes away meanwhile."""
    listeners = [DistributedTransports("gloo").listen("x", HOST) for _ in range(2)]
    for number, port in enumerate([1, *(listener.meeting.port for listener in listeners)]):
        owner.connect(offer_at(port, number))
        if number == 2:
            time.sleep(0.2)
            listeners[1].close()
    assert [t.name for t in threading.enumerate()].count("kv-join") >= 1
    eventually(lambda: "kv-join" not in [t.name for t in threading.enumerate()], within_s=4.0)
    listeners[0].close()


def test_a_receiver_that_never_comes_leaves_nothing_at_the_owner(make_owner):
    owner, me = make_owner(timeout_s=1.0), psutil.Process()
    offer_without_coming(owner)  # what a process opens once is open from here on
    before = usage(me)[1]
    offer_without_coming(owner)
    eventually(lambda: usage(me)[1] <= before)


def test_closing_the_reader_does_not_wait_for_a_frozen_owner(children, make_reader):
    owner, reader = children["bfloat16"], make_reader(dtype="bfloat16")
    reader.gets(owner.offer())
    owner("freeze_at", 1)
    reader.start(owner.offer())
    eventually(owner.is_frozen)
    started = time.monotonic()
    threading.Timer(0.5, owner.ps.resume).start()  # so that it hears of the release
    reader.close()
    assert type(reader.wait().error) is AbortedError
    assert time.monotonic() - started < 2.0


def usage(process):
    gc.collect()
    return process.num_threads(), process.num_fds()


def test_after_a_storm_of_pulls_aborts_and_deaths_everything_comes_back(
    children, victim, make_reader
):
    owner, me = children["float32"], psutil.Process()
    warm_up = make_reader()  # gRPC's own threads come once
    warm_up.gets(owner.offer())
    warm_up.close()
    owner("drop_idle_channels")
    time.sleep(0.2)
    mine, theirs = usage(me), usage(owner.ps)
    reader = make_reader()
    outcomes = []
    victim("freeze_at", 20)
    for i in range(200):
        handle = (victim if i % 10 == 9 else owner).offer([i % NUM_BLOCKS, (i + 1) % NUM_BLOCKS])
        if i % 20 == 4:
            handle = type(handle)(**{**fields_of(handle), "attempt": 1})
        reader.start(handle)
        if i % 5 == 1:
            reader.receiver.cancel(handle.request_id, handle.attempt)
        if i == 199:
            eventually(victim.is_frozen)
            victim.kill()
        if i % 4 == 3:
            outcomes += [reader.wait() for _ in range(4)]
    assert len(outcomes) == 200
    failed = [type(done.error) for done in outcomes if done.error is not None]
    assert 10 <= len(failed) <= 60
    assert set(failed) == {AbortedError, StaleHandleError, TransferError}
    reader.close()
    eventually(lambda: owner("num_leases") == 0)
    owner("drop_idle_channels")
    eventually(lambda: usage(me)[1] <= mine[1] and usage(me)[0] <= mine[0] + 2)
    eventually(lambda: usage(owner.ps)[1] <= theirs[1] and usage(owner.ps)[0] <= theirs[0] + 2)


if __name__ == "__main__":
    other_process(sys.argv[1], json.loads(sys.argv[2]))
