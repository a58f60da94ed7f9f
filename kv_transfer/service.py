"""The KV of a rank other than 0, served to rank 0 of the same worker: what it sends to other
workers' ranks, and what it pulls from them. A thin skin over RankSender and OwnerLink.

Errors travel inside the replies, so that rank 0 gets the same member of the error tree.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from torch import Tensor

from core.config import TransferConfig
from core.errors import ConfigError, TransferError, TwostrokeError
from core.kv import KVHandle, KVLayout
from core.worker import endpoint
from kv_transfer.distributed import DistributedTransports
from kv_transfer.link import OwnerLink, ReceivingRank, Wanted
from kv_transfer.peer_client import GrpcPeerClient
from kv_transfer.rank_client import TOKEN_KEY
from kv_transfer.rank_sender import RankSender
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import error_to_proto, handle_from_proto, offer_from_proto

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 256
"""Threads; each blocks while bytes move. More than there are owners to pull from, or what breaks a
pull would wait behind pulls."""


class RankKVServer:
    """A RankService (engine/distributed_executor.py)."""

    def __init__(self, host: str, config: TransferConfig) -> None:
        """Takes a port. Raises ConfigError when it cannot."""
        self._host = host
        self._config = config
        self._server = grpc.server(ThreadPoolExecutor(MAX_CONCURRENT_CALLS, "kv-rank"))
        try:
            port = self._server.add_insecure_port(endpoint(host, 0))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}: {error}") from error
        self.address = endpoint(host, port)
        self._rank: _RankKV | None = None

    def start(self, kv: Tensor, layouts: Sequence[KVLayout], rank: int, token: str) -> None:
        self._rank = _RankKV(kv, layouts, rank, token, self._host, self._config)
        worker_pb2_grpc.add_KVRankServicer_to_server(self._rank, self._server)
        self._server.start()

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()
        self._server.stop(None).wait()


class _RankKV(worker_pb2_grpc.KVRankServicer):
    def __init__(
        self,
        kv: Tensor,
        layouts: Sequence[KVLayout],
        rank: int,
        token: str,
        host: str,
        config: TransferConfig,
    ) -> None:
        transports = DistributedTransports(config.backend)
        self._token = token
        self._config = config
        self._sender = RankSender(
            kv,
            layout=layouts[rank],
            host=host,
            config=config,
            transports=transports,
            clock=time.monotonic,
        )
        self._receiver = ReceivingRank(
            kv,
            layouts=layouts,
            index=rank,
            host=host,
            config=config,
            transports=transports,
            clock=time.monotonic,
        )
        self._lock = threading.Lock()
        self._links: dict[str, tuple[OwnerLink, GrpcPeerClient]] = {}

    def Connect(self, request: pb.RankConnect, context: Any) -> pb.RankReply:
        self._check(context)
        offer, replaced = offer_from_proto(request.offer), tuple(request.replaced)
        error = _error_of(lambda: self._sender.connect(offer, replaced))
        return pb.RankReply(error=error)

    def Send(self, request: pb.RankSend, context: Any) -> pb.RankReply:
        self._check(context)
        sums: list[bytes] = []
        positions = range(request.first_position, request.end_position)

        def send() -> None:
            sums.extend(self._sender.send(request.channel_id, tuple(request.block_ids), positions))

        error = _error_of(send)
        return pb.RankReply(error=error, checksums=sums)

    def Drop(self, request: pb.RankDrop, context: Any) -> pb.RankReply:
        self._check(context)
        self._sender.drop(request.channel_id)
        return pb.RankReply()

    def Pull(self, request: pb.RankPull, context: Any) -> pb.RankReply:
        self._check(context)
        deadline = time.monotonic() + request.timeout_s

        def pull() -> None:
            wanted = Wanted(
                handle=handle_from_proto(request.handle),
                first_position=request.first_position,
                block_ids=tuple(request.block_ids),
            )
            self._link(request.link_id, wanted.handle).pull(wanted, deadline)

        return pb.RankReply(error=_error_of(pull))

    def _link(self, link_id: str, handle: KVHandle) -> OwnerLink:
        with self._lock:
            if link_id not in self._links:
                client = GrpcPeerClient(handle.address, self._config.timeout_s)
                link = OwnerLink(self._receiver, client, handle.incarnation)
                self._links[link_id] = link, client
            return self._links[link_id][0]

    def DropLink(self, request: pb.RankDropLink, context: Any) -> pb.RankReply:
        self._check(context)
        with self._lock:
            take = self._links.pop if request.for_good else self._links.get
            known = take(request.link_id, None)
        if known is not None:
            _end(*known) if request.for_good else known[0].drop()
        return pb.RankReply()

    def _check(self, context: Any) -> None:
        """Whoever reached this port could otherwise read and write any block."""
        shown = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(shown, self._token):
            logger.warning("refused a call from %s: it is not from this worker", context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "not from this worker")

    def close(self) -> None:
        self._sender.close()
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link, client in links:
            _end(link, client)


def _end(link: OwnerLink, client: GrpcPeerClient) -> None:
    link.close()
    client.close()


def _error_of(call: Callable[[], None]) -> pb.Error | None:
    """What nobody foresaw becomes a TransferError with a log entry, as at rank 0."""
    try:
        call()
    except TwostrokeError as error:
        return error_to_proto(error)
    except Exception:
        logger.exception("a call of rank 0 failed")
        return error_to_proto(TransferError("a rank failed to move its KV"))
    return None
