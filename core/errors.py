"""The errors every part of the cluster agrees on.

    TwostrokeError
    |-- ConfigError                    the operator asked for something impossible
    |   `-- ModelLoadError             the model folder or file cannot be used
    |-- InvalidRequestError            the client's request is at fault; names the parameter
    |   |-- ContextLengthError         prompt (or prompt + output) does not fit
    |   |-- UnsupportedParameterError  a parameter we know and do not honour
    |   `-- ModelNotFoundError         no such model here
    |-- OverloadedError                refused before any work was done; try later
    |-- DeadlineExceededError          the request's time ran out
    |-- AbortedError                   the client went away or asked to stop
    |-- InternalError                  a bug or an exception nobody foresaw; fails one request
    `-- RetryableError                 routing the request again may succeed
        |-- WorkerUnavailableError     no worker can take the request now
        |-- WorkerLostError            the worker died or its stream broke
        |   `-- RankLostError          one of its ranks did: the others cannot go on
        |-- PreemptedError             the decode worker needed the blocks for older sequences
        |-- StepFailedError            the model step it shared with others raised
        `-- TransferError              KV blocks could not be moved
            |-- HandshakeRefusedError  the two sides' layouts differ
            `-- StaleHandleError       the handle's blocks are no longer promised

Every class has a stable `code`: it crosses process borders inside protocol messages and is mapped
exactly once to an HTTP status (router/http_errors). Broken invariants are
asserts, never members of this tree.
"""

from __future__ import annotations

from typing import ClassVar


class TwostrokeError(Exception):
    """Root of all operational failures. `str(error)` is safe to show to the client."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(TwostrokeError):
    code = "config_error"


class ModelLoadError(ConfigError):
    code = "model_load_error"


class InvalidRequestError(TwostrokeError):
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class UnsupportedParameterError(InvalidRequestError):
    code = "unsupported_parameter"


class ModelNotFoundError(InvalidRequestError):
    code = "model_not_found"


class OverloadedError(TwostrokeError):
    code = "overloaded"


class DeadlineExceededError(TwostrokeError):
    code = "deadline_exceeded"


class AbortedError(TwostrokeError):
    code = "aborted"


class InternalError(TwostrokeError):
    code = "internal_error"


class RetryableError(TwostrokeError):
    code = "retryable"


class WorkerUnavailableError(RetryableError):
    code = "worker_unavailable"


class WorkerLostError(RetryableError):
    code = "worker_lost"


class RankLostError(WorkerLostError):
    code = "rank_lost"


class PreemptedError(RetryableError):
    code = "preempted"


class StepFailedError(RetryableError):
    code = "step_failed"


class TransferError(RetryableError):
    code = "transfer_failed"


class HandshakeRefusedError(TransferError):
    code = "handshake_refused"


class StaleHandleError(TransferError):
    code = "stale_handle"


def _tree(root: type[TwostrokeError]) -> list[type[TwostrokeError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE: dict[str, type[TwostrokeError]] = {
    cls.code: cls for cls in _tree(TwostrokeError) if cls is not TwostrokeError
}


def error_from_code(code: str, message: str, *, param: str | None = None) -> TwostrokeError:
    """Rebuild an error that crossed the wire. An unknown code becomes InternalError."""
    return _BY_CODE.get(code, InternalError)(message, param=param)
