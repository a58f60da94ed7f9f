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
MAX_CONCURRENT_TRANSFERS = 64
"""Threads for pulls; each blocks while bytes move. A decode worker has one pull at a time here."""


class KVPeerServicer(worker_pb2_grpc.KVPeerServicer):
    def __init__(self, sender: KVSender) -> None:
        self._sender = sender
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_TRANSFERS, "kv-send")

    async def Connect(self, request: pb.ChannelOffer, context: Context) -> pb.ConnectReply:
        try:
            self._sender.connect(offer_from_proto(request))
        except TwostrokeError as error:
            logger.warning("refused a channel from %s: %s", context.peer(), error)
            return pb.ConnectReply(error=error_to_proto(error))
        return pb.ConnectReply()

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullReply:
        try:
            sums = await self._blocking(lambda: self._sender.pull(pull_from_proto(request)))
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

    async def _blocking(self, call: Callable[[], T]) -> T:
        """Run off the event loop; what nobody foresaw becomes an InternalError with a log entry."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, call)
        except TwostrokeError:
            raise
        except Exception as error:
            logger.exception("a KVPeer call failed")
            raise InternalError("the KV owner failed to serve the call") from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
