"""Messages between ranks arrive whole and in order, and who waits for a dead one is told."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from core.errors import RankLostError
from parallel.control import MAX_UNREAD, ControlChannel
from parallel.rendezvous import gloo_backend, host_store

HOST = "127.0.0.1"
SIZES = (0, 1, 4087, 4088, 4089, 4096, 100_000)
"""Around what fits into a message's first part."""


@pytest.fixture
def together():
    """Run one function per rank, each in a thread of its own; their results in order."""

    def run(*functions):
        with ThreadPoolExecutor(len(functions)) as pool:
            running = [pool.submit(function) for function in functions]
            return [one.result(60) for one in running]

    return run


@pytest.fixture
def channels(together):
    def make(size, *, timeout_s=20.0):
        store = HashStore()

        def join(rank):
            backend = gloo_backend(store, rank, size, host=HOST, timeout_s=timeout_s)
            return ControlChannel(backend, timeout_s=timeout_s)

        return together(*(lambda rank=rank: join(rank) for rank in range(size)))

    return make


def test_messages_of_all_sizes_arrive_whole_and_in_order(channels, together):
    messages = [random.Random(size).randbytes(size) for size in SIZES] * 3
    root, *others = channels(3)

    def send():
        for message in messages:
            root.broadcast(message)
        root.flush(20)

    _, *received = together(
        send, *(lambda other=other: [other.receive(0) for _ in messages] for other in others)
    )
    assert received == [messages, messages]


def test_answers_and_plans_cross_on_their_way(channels, together):
    """Both sides send a lot before either receives."""
    root, *others = channels(3)
    sent = [bytes([i]) * (5000 if i % 3 else 10) for i in range(MAX_UNREAD)]
    for message in sent:
        root.broadcast(message)
        for other in others:
            other.send(message, 0)
    for other in others:
        assert [root.receive(other.rank) for _ in sent] == sent
        assert [other.receive(0) for _ in sent] == sent
    for channel in (root, *others):
        channel.flush(20)


def test_a_busy_channel_keeps_no_message_that_was_received(channels, together):
    root, other = channels(2)
    count = 5 * MAX_UNREAD

    def send():
        for i in range(count):
            root.broadcast(b"%d" % i)
            assert len(root._unread) <= MAX_UNREAD

    together(send, lambda: [other.receive(0) for _ in range(count)])


def test_a_receiver_that_is_far_behind_for_too_long_is_lost(channels):
    root, _behind = channels(2, timeout_s=0.5)
    for _ in range(MAX_UNREAD):
        root.broadcast(b"plan")
    with pytest.raises(RankLostError):
        root.broadcast(b"one too many")


def test_flush_waits_for_the_receiver(channels, together):
    root, other = channels(2)
    may_receive = threading.Event()
    root.broadcast(b"stop")
    with ThreadPoolExecutor(2) as pool:
        flushed = pool.submit(root.flush, 20)
        received = pool.submit(lambda: may_receive.wait(20) and other.receive(0))
        assert not flushed.done()
        may_receive.set()
        assert received.result(20) == b"stop"
        flushed.result(20)
    root.flush(20)  # nothing is left to wait for


def test_a_flush_that_nobody_receives_ends(channels):
    root, _ = channels(2)
    root.broadcast(b"stop")
    with pytest.raises(RankLostError):
        root.flush(0.2)


def test_a_silent_rank_is_lost_after_the_time_given(channels):
    root, _ = channels(2)
    with pytest.raises(RankLostError):
        root.receive(1, 0.2)


PEER = """
import sys
from parallel.control import ControlChannel
from parallel.rendezvous import Meeting, gloo_backend, join_store

store = join_store(Meeting(sys.argv[1], int(sys.argv[2])), 60)
rank, size = map(int, sys.argv[3:])
channel = ControlChannel(
    gloo_backend(store, rank, size, host=sys.argv[1], timeout_s=60), timeout_s=60
)
channel.send(b"here", 0)
channel.receive(0)
"""


@pytest.fixture
def peers():
    """(channel of rank 0, processes of the other ranks, which wait for a message for ever)."""
    processes = []

    def start(size):
        store, meeting = host_store(HOST)
        for rank in range(1, size):
            arguments = [*map(str, (*meeting, rank, size))]
            processes.append(subprocess.Popen([sys.executable, "-c", PEER, *arguments]))
        backend = gloo_backend(store, 0, size, host=HOST, timeout_s=60)
        root = ControlChannel(backend, timeout_s=60)
        for rank in range(1, size):
            assert root.receive(rank) == b"here"
        return root, processes

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_who_waits_for_ever_for_a_rank_that_dies_is_told_at_once(peers):
    root, [victim, other] = peers(3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(root.receive, 1)
        victim.kill()
        with pytest.raises(RankLostError):
            waiting.result(20)
    with pytest.raises(RankLostError):
        root.send(b"plan", 1)
    root.send(b"go", 2)  # the third one is as well as before
    root.flush(20)
    assert other.wait(20) == 0


def test_ranks_whose_rank_0_dies_end(peers):
    """Its channel goes with it."""
    root, processes = peers(3)
    del root
    assert [process.wait(20) for process in processes] == [1, 1]


def test_no_thread_is_left(channels):
    before = len(os.listdir("/proc/self/task"))
    made = channels(3)
    assert len(os.listdir("/proc/self/task")) > before
    made.clear()
    assert len(os.listdir("/proc/self/task")) == before
