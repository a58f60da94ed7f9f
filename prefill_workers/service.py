"""KVPeer over gRPC: other workers connect, pull and release here. A thin skin over KVSender.

Errors travel inside the replies, so that the other side gets the same member of the error tree.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from core.errors import InternalError, TwostrokeError
from kv_transfer.sender import KVSender
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import error_to_proto, offer_from_proto, pull_from_proto

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
MAX_CONCURRENT_TRANSFERS = 256
"""Threads for pulls; each blocks while bytes move. A decode worker has one at a time here for each
of its ranks and each of ours that holds something for it."""
MAX_CONCURRENT_CONNECTS = 8
"""Threads for connects, which may not wait for pulls: they ask our other ranks, for moments."""


class KVPeerServicer(worker_pb2_grpc.KVPeerServicer):
    def __init__(self, sender: KVSender) -> None:
        self._sender = sender
        self._pulls = ThreadPoolExecutor(MAX_CONCURRENT_TRANSFERS, "kv-send")
        self._connects = ThreadPoolExecutor(MAX_CONCURRENT_CONNECTS, "kv-connect")

    async def Connect(self, request: pb.ChannelOffer, context: Context) -> pb.ConnectReply:
        try:
            offer = offer_from_proto(request)
            await _off_the_loop(self._connects, lambda: self._sender.connect(offer))
        except TwostrokeError as error:
            logger.warning("refused a channel from %s: %s", context.peer(), error)
            return pb.ConnectReply(error=error_to_proto(error))
        return pb.ConnectReply()

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullReply:
        try:
            pull = pull_from_proto(request)
            sums = await _off_the_loop(self._pulls, lambda: self._sender.pull(pull))
        except TwostrokeError as error:
            logger.warning("pull of %s failed: %s", request.handle_id, error)
            return pb.PullReply(error=error_to_proto(error))
        return pb.PullReply(checksums=sums)

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: Context
    ) -> pb.RenewLeasesReply:
        unknown = self._sender.renew(tuple(request.handle_ids))
        return pb.RenewLeasesReply(unknown_handle_ids=unknown)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        for handle_id in request.handle_ids:
            self._sender.release(handle_id, request.reason)
        return pb.ReleaseReply()

    def close(self) -> None:
        for threads in (self._pulls, self._connects):
            threads.shutdown(wait=False, cancel_futures=True)


async def _off_the_loop(threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    """What nobody foresaw becomes an InternalError with a log entry."""
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, call)
    except TwostrokeError:
        raise
    except Exception as error:
        logger.exception("a KVPeer call failed")
        raise InternalError("the KV owner failed to serve the call") from error
