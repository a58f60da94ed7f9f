"""Both ends of KV transfers without a model, and the bare wires that they are compared with.

An owner of blocks is a KVSender with a RankSender for each of its ranks, in a process of its own
behind gRPC and gloo (`far_owner`), or in this process with direct calls and the loopback transport
(`near_owner`). A reader is a KVReceiver in this process. All ranks of a side share its process.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch
from torch import Tensor

from core.config import TransferConfig
from core.kv import BlockRef, ChannelOffer, KVHandle, KVLayout, PullRequest
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from cpu_kernels.kv_dtype import KV_DTYPES
from cpu_kernels.kv_order import tile
from kv_transfer.distributed import DistributedTransports
from kv_transfer.link import OwnerLink, ReceivingRank
from kv_transfer.loopback import LoopbackTransports
from kv_transfer.peer_client import GrpcPeerClient
from kv_transfer.rank_sender import RankSender
from kv_transfer.receiver import KVReceiver, PeerClient
from kv_transfer.sender import KVSender
from kv_transfer.transport import TransportFactory
from prefill_workers.service import KVPeerServicer
from protocol.worker_pb2_grpc import add_KVPeerServicer_to_server

HOST = "127.0.0.1"
INCARNATION = "measured"
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A worker's KV. Layers and head_dim are SmolLM2-135M's where nothing else is said."""

    tp: int = 1
    pp: int = 1
    dtype: str = "bfloat16"
    block_size: int = 16
    num_layers: int = 30
    num_kv_heads: int = 3

    def layouts(self) -> tuple[KVLayout, ...]:
        num_layers, num_kv_heads = self.num_layers // self.pp, self.num_kv_heads // self.tp
        return tuple(
            KVLayout(
                model="measured",
                dtype=self.dtype,
                block_size=self.block_size,
                first_layer=stage * num_layers,
                num_layers=num_layers,
                first_kv_head=rank * num_kv_heads,
                num_kv_heads=num_kv_heads,
                head_dim=64,
                inner_order="tiles16",
            )
            for stage in range(self.pp)
            for rank in range(self.tp)
        )


def new_pool(layout: KVLayout, num_blocks: int) -> Tensor:
    """Numbers as a model has them, in every layer the same. All memory is written to, for pages
    that are not would all be the one of zeros."""
    num_layers, *shape, _ = layout.shape(num_blocks)
    layer = tile(KV_DTYPES[layout.dtype].encode(torch.randn(*shape, layout.head_dim)))
    return layer.expand(num_layers, *layer.shape).contiguous()


def scattered(num_blocks: int) -> list[int]:
    """Block ids as a pool in use gives them out."""
    return torch.randperm(num_blocks).tolist()


# -- the owner


def new_sender(
    shape: Shape,
    num_blocks: int,
    config: TransferConfig,
    *,
    address: str,
    transports: TransportFactory,
) -> KVSender:
    layouts = shape.layouts()
    ranks = [
        RankSender(
            new_pool(layout, num_blocks),
            layout=layout,
            host=HOST,
            config=config,
            transports=transports,
            clock=time.monotonic,
        )
        for layout in layouts
    ]
    return KVSender(
        ranks,
        layouts=layouts,
        incarnation=INCARNATION,
        worker="owner",
        address=address,
        config=config,
        backend=transports.backend,
        clock=time.monotonic,
    )


class Offers:
    """New handles, over blocks that are taken anew for each."""

    def __init__(self, sender: KVSender, shape: Shape, num_blocks: int) -> None:
        self._sender = sender
        self._block_size = shape.block_size
        self._block_ids = scattered(num_blocks)
        self._numbers = itertools.count()

    def __call__(self, num_blocks: int) -> KVHandle:
        self._sender.poll(time.monotonic())
        request = GenerateRequest(
            request_id=str(next(self._numbers)),
            model="measured",
            prompt_token_ids=(1,),
            sampling=SamplingParams(),
        )
        return self._sender.offer(
            request,
            blocks=[BlockRef(block_id=i, generation=1) for i in self._block_ids[:num_blocks]],
            block_hashes=[i.to_bytes(16) for i in range(num_blocks)],
            num_tokens=num_blocks * self._block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """As this process sees it."""

    offer: Callable[[int], KVHandle]
    """Number of blocks -> a handle."""
    new_client: Callable[[], PeerClient]
    transports: TransportFactory


@contextmanager
def near_owner(shape: Shape, num_blocks: int, config: TransferConfig) -> Iterator[Owner]:
    transports = LoopbackTransports()
    sender = new_sender(shape, num_blocks, config, address="here", transports=transports)
    yield Owner(
        offer=Offers(sender, shape, num_blocks),
        new_client=lambda: _DirectClient(sender),
        transports=transports,
    )
    sender.close()


class _DirectClient:
    def __init__(self, sender: KVSender) -> None:
        self._sender = sender
        self.pull: Callable[[PullRequest], tuple[bytes, ...]] = sender.pull
        self.renew = sender.renew

    def connect(self, offer: ChannelOffer, timeout_s: float) -> None:
        self._sender.connect(offer)

    def release(self, handle_ids: Sequence[str], reason: str) -> None:
        for handle_id in handle_ids:
            self._sender.release(handle_id, reason)

    def close(self) -> None:
        pass


@contextmanager
def far_owner(shape: Shape, num_blocks: int, config: TransferConfig) -> Iterator[Owner]:
    with other_process(_serve_owner, shape, num_blocks, config) as connection:
        address: str = connection.recv()

        def offer(num_wanted: int) -> KVHandle:
            connection.send(num_wanted)
            handle: KVHandle = connection.recv()
            return handle

        yield Owner(
            offer=offer,
            new_client=lambda: GrpcPeerClient(address, config.timeout_s),
            transports=DistributedTransports("gloo"),
        )
        connection.send(None)


def _serve_owner(
    connection: Connection, shape: Shape, num_blocks: int, config: TransferConfig
) -> None:
    asyncio.run(_serving(connection, shape, num_blocks, config))


async def _serving(
    connection: Connection, shape: Shape, num_blocks: int, config: TransferConfig
) -> None:
    server = grpc.aio.server()
    address = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    transports = DistributedTransports("gloo")
    sender = new_sender(shape, num_blocks, config, address=address, transports=transports)
    servicer = KVPeerServicer(sender)
    add_KVPeerServicer_to_server(servicer, server)
    await server.start()
    connection.send(address)
    offers = Offers(sender, shape, num_blocks)
    loop = asyncio.get_running_loop()
    while (num_wanted := await loop.run_in_executor(None, connection.recv)) is not None:
        connection.send(offers(num_wanted))
    await server.stop(None)
    servicer.close()
    sender.close()


@contextmanager
def other_process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """`target` in a process of its own, with one thread, which gets a connection to this one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=_with_one_thread, args=(target, there, *arguments), daemon=True
    )
    process.start()
    there.close()
    try:
        yield here
        process.join(PATIENCE_S)
    finally:
        here.close()
        process.kill()
        process.join()


def _with_one_thread(target: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    target(*arguments)


# -- the reader


class Reader:
    def __init__(
        self, owner: Owner, shape: Shape, pools: Sequence[Tensor], config: TransferConfig
    ) -> None:
        """`pools`: one per rank of the shape."""
        layouts = shape.layouts()
        first, *others = (
            ReceivingRank(
                pool,
                layouts=layouts,
                index=index,
                config=config,
                host=HOST,
                transports=owner.transports,
                clock=time.monotonic,
            )
            for index, pool in enumerate(pools)
        )
        client = owner.new_client()
        self._done = threading.Event()
        self._block_size = shape.block_size
        self._block_ids = scattered(pools[0].shape[2])
        self._receiver = KVReceiver(
            first,
            peers=lambda _: client,
            other_ranks=[partial(OwnerLink, rank, client, INCARNATION) for rank in others],
            wake=self._done.set,
        )

    def pull(self, handle: KVHandle) -> float:
        """Seconds from `start` to PullDone."""
        block_ids = self._block_ids[: -(-handle.num_tokens // self._block_size)]
        self._done.clear()
        started = time.perf_counter()
        self._receiver.start(handle, 0, block_ids)
        assert self._done.wait(PATIENCE_S), "no PullDone came"
        seconds = time.perf_counter() - started
        (done,) = self._receiver.poll()
        if done.error is not None:
            raise done.error
        return seconds

    def close(self) -> None:
        self._receiver.close()


# -- bare wires


class Wires:
    """A TCP connection and a gloo pair, over which another process sends what is asked for. Both
    go from one buffer of a message into two that take turns."""

    def __init__(self, connection: Connection, max_message_bytes: int) -> None:
        self._connection = connection
        self._buffers = torch.ones(2, max_message_bytes, dtype=torch.uint8)
        listener = DistributedTransports("gloo").listen("wire.0.1", HOST)
        with socket.create_server((HOST, 0)) as server:
            offer = ChannelOffer(
                channel_id="wire.0.1",
                source=0,
                backend="gloo",
                store_host=listener.meeting.host,
                store_port=listener.meeting.port,
                layout=Shape().layouts()[0],
                incarnation=INCARNATION,
                max_message_bytes=max_message_bytes,
            )
            connection.send((server.getsockname()[1], offer))
            self._socket, _ = server.accept()
            self._gloo = listener.accept(PATIENCE_S)
        listener.close()

    def tcp(self, sizes: Sequence[int]) -> float:
        """Seconds for messages of these bytes, as for `gloo`."""
        buffer = memoryview(self._buffers[0].numpy())
        started = self._ask("tcp", sizes)
        for size in sizes:
            while size:
                size -= self._socket.recv_into(buffer[:size])
        return time.perf_counter() - started

    def gloo(self, sizes: Sequence[int]) -> float:
        """The next receive is posted as soon as one has ended: as a transfer does it."""
        receives = [
            partial(self._gloo.post_recv, self._buffers[i % 2, :size])
            for i, size in enumerate(sizes)
        ]
        pending = receives[0]()
        started = self._ask("gloo", sizes)
        for post_next in receives[1:]:
            pending.wait(PATIENCE_S)
            pending = post_next()
        pending.wait(PATIENCE_S)
        return time.perf_counter() - started

    def _ask(self, wire: str, sizes: Sequence[int]) -> float:
        started = time.perf_counter()
        self._connection.send((wire, sizes))
        return started


@contextmanager
def open_wires(max_message_bytes: int) -> Iterator[Wires]:
    with other_process(_send_on_request, max_message_bytes) as connection:
        yield Wires(connection, max_message_bytes)
        connection.send(None)


def _send_on_request(connection: Connection, max_message_bytes: int) -> None:
    port, offer = connection.recv()
    buffer = torch.ones(max_message_bytes, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    with socket.create_connection((HOST, port)) as tcp:
        gloo = DistributedTransports("gloo").join(offer, HOST, PATIENCE_S)
        while (wanted := connection.recv()) is not None:
            wire, sizes = wanted
            for size in sizes:
                if wire == "tcp":
                    tcp.sendall(view[:size])
                else:
                    gloo.send(buffer[:size], PATIENCE_S)
        gloo.close()
