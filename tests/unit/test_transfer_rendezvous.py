"""Two ends of a gloo channel meet, or do not: either way within the time given."""

import threading
import time

import pytest
import torch
from torch.distributed import Store, TCPStore

import parallel.rendezvous
from core.errors import TransferError
from core.kv import ChannelOffer, KVLayout
from kv_transfer.distributed import DistributedTransports

HOST = "127.0.0.1"
LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=1,
    first_layer=0,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


class Dying(Store):
    """The joiner's view of the store: it dies when it has said where gloo finds it."""

    def __init__(self, *arguments, **options):
        super().__init__()
        self.store = TCPStore(*arguments, **options)
        self.keys = []

    def set(self, key, value):
        self.keys.append(key)
        self.store.set(key, value)

    def wait(self, keys, *timeout):
        if len(self.keys) > 1:
            raise RuntimeError("died")
        self.store.wait(keys, *timeout)


@pytest.fixture
def listener():
    listener = DistributedTransports("gloo").listen("c", HOST)
    yield listener
    listener.close()


@pytest.fixture
def join(listener):
    """Join `listener` on another thread, after `delay_s`."""
    threads, outcomes = [], []
    offer = ChannelOffer(
        source=0,
        channel_id="c",
        backend="gloo",
        store_host=HOST,
        store_port=listener.meeting.port,
        layout=LAYOUT,
        incarnation="i",
        max_message_bytes=1,
    )

    def run(delay_s, timeout_s):
        time.sleep(delay_s)
        try:
            outcomes.append(DistributedTransports("gloo").join(offer, HOST, timeout_s))
        except TransferError as error:
            outcomes.append(error)

    def start(delay_s=0.0, timeout_s=5.0):
        threads.append(threading.Thread(target=run, args=(delay_s, timeout_s)))
        threads[-1].start()
        return outcomes

    yield start
    for thread in threads:
        thread.join(10)


def test_a_late_joiner_is_waited_for(listener, join):
    """Nearly as long as the whole time given: gloo alone would wait for a fifth of it."""
    joined = join(delay_s=1.2)
    receiver = listener.accept(2.0)
    got = torch.zeros(3)
    pending = receiver.post_recv(got)
    while not joined:
        time.sleep(0.001)
    joined[0].send(torch.arange(3.0), 2.0)
    pending.wait(2.0)
    assert got.tolist() == [0.0, 1.0, 2.0]
    receiver.close()
    joined[0].close()


def test_nobody_joins(listener):
    started = time.monotonic()
    with pytest.raises(TransferError):
        listener.accept(0.3)
    assert 0.25 < time.monotonic() - started < 0.8


def test_a_joiner_that_dies_amid_the_meeting_costs_no_more_than_the_time_given(
    listener, join, monkeypatch
):
    monkeypatch.setattr(parallel.rendezvous, "TCPStore", Dying)
    joined = join()
    started = time.monotonic()
    with pytest.raises(TransferError):  # at once, or, where gloo had just connected, at first use
        listener.accept(1.0).post_recv(torch.zeros(1)).wait(1.0)
    assert time.monotonic() - started < 2.5
    assert isinstance(joined[0], TransferError)
