"""Errors as OpenAI clients expect them: one table from our tree to status codes, one body shape."""

from __future__ import annotations

import json
from typing import NamedTuple

from core.errors import (
    AbortedError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RetryableError,
    TwostrokeError,
)

RETRY_AFTER_S = 1


class BodyTooLargeError(InvalidRequestError):
    """Met over HTTP only, so it is not in the tree that every process knows."""

    code = "body_too_large"


class HeadersTooLargeError(InvalidRequestError):
    """Met over HTTP only, like a body too large."""

    code = "headers_too_large"


class HttpError(NamedTuple):
    status: int
    kind: str
    """OpenAI's `type`."""
    retry: bool
    """Whether the same request may succeed later: told to clients by x-should-retry."""


_BAD_REQUEST = "invalid_request_error"
_SERVER = "server_error"
# The first class that matches wins, so children stand before their parents.
_TABLE: tuple[tuple[type[TwostrokeError], HttpError], ...] = (
    (ModelNotFoundError, HttpError(404, _BAD_REQUEST, retry=False)),
    (BodyTooLargeError, HttpError(413, _BAD_REQUEST, retry=False)),
    (HeadersTooLargeError, HttpError(431, _BAD_REQUEST, retry=False)),
    (InvalidRequestError, HttpError(400, _BAD_REQUEST, retry=False)),
    (OverloadedError, HttpError(429, "rate_limit_error", retry=True)),
    (AbortedError, HttpError(499, _BAD_REQUEST, retry=False)),
    (DeadlineExceededError, HttpError(504, _SERVER, retry=False)),
    (RetryableError, HttpError(503, _SERVER, retry=True)),
)
_INTERNAL = HttpError(500, _SERVER, retry=False)
"""A bug met again is the same bug: clients that retry 500s would only run it three times."""


def http_error(error: TwostrokeError) -> HttpError:
    return next((entry for cls, entry in _TABLE if isinstance(error, cls)), _INTERNAL)


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None) -> bytes:
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": fields}, ensure_ascii=False).encode()


def describe(error: TwostrokeError, request_id: str) -> bytes:
    """The body for `error`. Of an internal one only its id leaves; the log has the rest."""
    entry = http_error(error)
    message = internal_message(request_id) if entry is _INTERNAL else error.message
    code = InternalError.code if entry is _INTERNAL else error.code
    return error_body(message, entry.kind, param=error.param, code=code)


def is_internal(error: TwostrokeError) -> bool:
    return http_error(error) is _INTERNAL


def internal_message(request_id: str) -> str:
    return f"internal error; the server's log has more under the id {request_id}"


def error_headers(*, retry: bool) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if retry:
        headers["retry-after"] = str(RETRY_AFTER_S)
    else:
        headers["x-should-retry"] = "false"
    return headers
