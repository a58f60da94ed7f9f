"""A rank's KV as rank 0 reaches it: over gRPC, with the worker's token, or not at all."""

import socket
import time

import pytest
import torch

from core.config import TransferConfig
from core.errors import RankLostError, TransferError
from core.kv import KVHandle, KVLayout
from kv_transfer.link import Wanted
from kv_transfer.rank_client import RankClient
from kv_transfer.service import RankKVServer

HOST = "127.0.0.1"
LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=4,
    first_layer=0,
    num_layers=1,
    num_kv_heads=2,
    head_dim=4,
)


@pytest.fixture
def server():
    server = RankKVServer(HOST, TransferConfig(timeout_s=2.0))
    layouts = (LAYOUT, LAYOUT)
    server.start(torch.zeros(LAYOUT.shape(8)), layouts, 1, "the token")
    yield server
    server.close()


@pytest.fixture
def make_client():
    clients = []

    def make(address, token="the token"):
        clients.append(RankClient(address, token, 2.0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def wanted():
    """Of an owner that nobody can reach."""
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    handle = KVHandle(
        handle_id="h",
        request_id="r",
        attempt=0,
        worker="p",
        incarnation="i",
        address=f"{HOST}:{port}",
        layouts=(LAYOUT,),
        blocks=(),
        block_hashes=(),
        num_tokens=4,
        lease_s=1.0,
    )
    return Wanted(handle=handle, first_position=0, block_ids=(1,))


def test_who_does_not_show_the_token_reads_and_writes_nothing(server, make_client, wanted):
    stranger = make_client(server.address, token="a guess")
    with pytest.raises(TransferError, match="UNAUTHENTICATED"):
        stranger.send("c", [1], range(4))
    with pytest.raises(RankLostError, match="UNAUTHENTICATED"):
        stranger.link().pull(wanted, time.monotonic() + 2.0)
    with pytest.raises(TransferError, match="unknown or was closed"):
        make_client(server.address).send("c", [1], range(4))


def test_what_a_rank_says_of_a_pull_is_its_own_word(server, make_client, wanted):
    """It has answered, so it writes no more: an ordinary failure of one request."""
    with pytest.raises(TransferError, match="did not answer") as caught:
        make_client(server.address).link().pull(wanted, time.monotonic() + 2.0)
    assert not isinstance(caught.value, RankLostError)


def test_a_rank_that_does_not_answer_a_pull_is_lost(server, make_client, wanted):
    client = make_client(server.address)
    server.close()
    link = client.link()
    with pytest.raises(RankLostError):
        link.pull(wanted, time.monotonic() + 2.0)
    link.drop()  # nothing to break, and no reason to fail
    with pytest.raises(TransferError, match="did not answer"):
        client.send("c", [1], range(4))


def test_a_link_that_is_gone_for_good_is_forgotten(server, make_client, wanted):
    link = make_client(server.address).link()
    for _ in range(2):
        with pytest.raises(TransferError):
            link.pull(wanted, time.monotonic() + 2.0)
    assert len(server._rank._links) == 1
    link.drop()
    assert len(server._rank._links) == 1
    link.close()
    assert not server._rank._links
