"""Rank 0's way to the KV of the other ranks of its worker, over gRPC: a SendingRank for KVSender, a
RankLink for KVReceiver. Each call shows the worker's own token: a rank serves nobody else.

A rank that does not answer is a TransferError, but where it may be writing into blocks: then it is
a RankLostError, since nobody knows when these are free again.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from core.errors import RankLostError, TransferError, TwostrokeError
from core.kv import ChannelOffer
from kv_transfer.link import Wanted
from kv_transfer.peer_client import SHORT_CALL_S
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import error_from_proto, handle_to_proto, offer_to_proto

logger = logging.getLogger(__name__)

TOKEN_KEY = "twostroke-worker-token"


class RankClient:
    """To one rank: a rank_sender.SendingRank; `link` is a receiver.RankLinker."""

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._metadata = ((TOKEN_KEY, token),)
        # Workers are dialled directly, whatever http_proxy says.
        self._channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
        self.stub = worker_pb2_grpc.KVRankStub(self._channel)
        self._drops = ThreadPoolExecutor(1, "kv-drop")

    def connect(self, offer: ChannelOffer, replaced: Sequence[str]) -> None:
        request = pb.RankConnect(offer=offer_to_proto(offer), replaced=replaced)
        self._call_harmless(self.stub.Connect, request, SHORT_CALL_S)

    def send(
        self, channel_id: str, block_ids: Sequence[int], positions: range
    ) -> tuple[bytes, ...]:
        request = pb.RankSend(
            channel_id=channel_id,
            block_ids=block_ids,
            first_position=positions.start,
            end_position=positions.stop,
        )
        return tuple(self._call_harmless(self.stub.Send, request, self._timeout_s).checksums)

    def drop(self, channel_id: str) -> None:
        request = pb.RankDrop(channel_id=channel_id)
        self._drops.submit(self.try_to, self.stub.Drop, request)

    def link(self) -> RemoteLink:
        return RemoteLink(self)

    def close(self) -> None:
        self._drops.shutdown()
        self._channel.close()

    def call(
        self, method: Callable[..., pb.RankReply], request: Any, timeout_s: float
    ) -> pb.RankReply:
        """Raises the rank's own error, or RankLostError when it does not answer."""
        try:
            reply = method(request, timeout=timeout_s, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as error:  # the latter: after `close`
            code = getattr(error, "code", lambda: None)()
            raise RankLostError(f"a rank of this worker did not answer ({code})") from error
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return reply

    def try_to(self, method: Callable[..., pb.RankReply], request: Any) -> None:
        """Break something: where that fails, timeouts will."""
        try:
            self.call(method, request, SHORT_CALL_S)
        except TwostrokeError as error:
            logger.warning("could not break a KV transfer: %s", error)

    def _call_harmless(
        self, method: Callable[..., pb.RankReply], request: Any, timeout_s: float
    ) -> pb.RankReply:
        """Where a rank that does not answer does no harm."""
        try:
            return self.call(method, request, timeout_s)
        except RankLostError as error:
            raise TransferError(error.message) from error


class RemoteLink:
    """Of the rank to one owner, which its pulls name."""

    def __init__(self, client: RankClient) -> None:
        self._client = client
        self._link_id = secrets.token_hex(8)

    def pull(self, wanted: Wanted, deadline: float) -> None:
        left = max(0.0, deadline - time.monotonic())
        request = pb.RankPull(
            handle=handle_to_proto(wanted.handle),
            first_position=wanted.first_position,
            block_ids=wanted.block_ids,
            timeout_s=left,
            link_id=self._link_id,
        )
        self._client.call(self._client.stub.Pull, request, left + SHORT_CALL_S)

    def drop(self) -> None:
        self._break(for_good=False)

    def close(self) -> None:
        self._break(for_good=True)

    def _break(self, *, for_good: bool) -> None:
        request = pb.RankDropLink(link_id=self._link_id, for_good=for_good)
        self._client.try_to(self._client.stub.DropLink, request)
