"""Calls to the owner of leased KV blocks, over gRPC. Synchronous: used by transfer threads only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from core.errors import TransferError
from core.kv import ChannelOffer, PullRequest
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import error_from_proto, offer_to_proto, pull_to_proto

Reply = TypeVar("Reply")
SHORT_CALL_S = 5.0
"""Deadline of calls that move no bytes."""


class GrpcPeerClient:
    """One owner. Raises TwostrokeError only: the owner's own refusal, or TransferError."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        # Workers are dialled directly, whatever http_proxy says.
        self._channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
        self._stub = worker_pb2_grpc.KVPeerStub(self._channel)

    def connect(self, offer: ChannelOffer, timeout_s: float) -> None:
        reply = self._call(self._stub.Connect, offer_to_proto(offer), timeout_s)
        if reply.HasField("error"):
            raise error_from_proto(reply.error)

    def pull(self, pull: PullRequest) -> tuple[bytes, ...]:
        reply = self._call(self._stub.Pull, pull_to_proto(pull), self._timeout_s)
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return tuple(reply.checksums)

    def renew(self, handle_ids: Sequence[str]) -> tuple[str, ...]:
        """Handles the owner no longer knows."""
        request = pb.RenewLeasesRequest(handle_ids=handle_ids)
        return tuple(self._call(self._stub.RenewLeases, request, SHORT_CALL_S).unknown_handle_ids)

    def release(self, handle_ids: Sequence[str], reason: str) -> None:
        request = pb.ReleaseRequest(handle_ids=handle_ids, reason=reason)
        self._call(self._stub.Release, request, SHORT_CALL_S)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Callable[..., Reply], request: Any, timeout_s: float) -> Reply:
        try:
            return method(request, timeout=timeout_s)
        except (grpc.RpcError, ValueError) as error:  # the latter: after `close`
            code = getattr(error, "code", lambda: None)()
            raise TransferError(f"the KV owner {self._address} did not answer ({code})") from error
