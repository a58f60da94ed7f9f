"""What OpenAI clients read: whole replies and stream events, as bytes. Knows no workers.

Stream events are made by hand, since one is made per token: what is equal in all events of a
request is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from core.request import FinishReason
from router.choice import LogprobEntry, TextChunk

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


class Usage(NamedTuple):
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class ReplyHead(NamedTuple):
    """Equal in the whole reply and in all events of one request."""

    request_id: str
    created: int
    """Unix time, seconds."""
    model: str
    include_usage: bool
    return_token_ids: bool
    logprobs: bool


class ReplyWriter(Protocol):
    """One endpoint's shapes."""

    def events(self, chunk: TextChunk) -> bytes:
        """Stream events for one chunk: none, one or several."""

    def usage_event(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[TextChunk], usage: Usage) -> bytes: ...


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


_REASONS: dict[str | None, str] = {r.value: f'"{r.value}"' for r in FinishReason} | {None: "null"}


class _EventMaker:
    """`data: {head, "choices": [...], "usage": null}` with everything but the choice made once."""

    def __init__(self, head: ReplyHead, kind: str, id_prefix: str) -> None:
        self._head = head
        self.identity = {
            "id": f"{id_prefix}-{head.request_id}",
            "object": kind,
            "created": head.created,
            "model": head.model,
        }
        self._before = "data: " + _dump(self.identity)[:-1] + ',"choices":['
        self._after = '],"usage":null}\n\n' if head.include_usage else "]}\n\n"

    def choice(
        self,
        index: int,
        content: str,
        reason: str | None,
        token_ids: Sequence[int],
        logprobs: dict[str, Any] | None,
    ) -> str:
        """`content` is the JSON of the endpoint's own field."""
        ids = f',"token_ids":{_dump(list(token_ids))}' if self._head.return_token_ids else ""
        return (
            f'{self._before}{{"index":{index},{content},'
            f'"logprobs":{"null" if logprobs is None else _dump(logprobs)},'
            f'"finish_reason":{_REASONS[reason]}{ids}}}{self._after}'
        )

    def usage(self, usage: Usage) -> bytes:
        return event(_dump({**self.identity, "choices": [], "usage": usage.as_json()}).encode())


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


class CompletionWriter:
    """Shapes of /v1/completions."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._maker = _EventMaker(head, "text_completion", "cmpl")

    def events(self, chunk: TextChunk) -> bytes:
        if not (chunk.finish_reason or _says_something(self._head, chunk)):
            return b""
        content = f'"text":{_dump(chunk.text)}'
        reason, logprobs = _reason(chunk.finish_reason), self._logprobs(chunk)
        return self._maker.choice(chunk.index, content, reason, chunk.token_ids, logprobs).encode()

    def usage_event(self, usage: Usage) -> bytes:
        return self._maker.usage(usage)

    def whole(self, choices: Sequence[TextChunk], usage: Usage) -> bytes:
        rows = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": self._logprobs(choice),
                "finish_reason": _reason(choice.finish_reason),
                **_token_ids(self._head, choice),
            }
            for choice in choices
        ]
        return _whole(self._maker.identity, rows, usage)

    def _logprobs(self, chunk: TextChunk) -> dict[str, Any] | None:
        if not (self._head.logprobs and chunk.logprobs):
            return None
        return {
            "tokens": [_token_text(entry.piece) for entry in chunk.logprobs],
            "token_logprobs": [_number(entry.logprob) for entry in chunk.logprobs],
            "top_logprobs": [_top_by_text(entry) for entry in chunk.logprobs],
            "text_offset": [entry.text_offset for entry in chunk.logprobs],
        }


class ChatWriter:
    """Shapes of /v1/chat/completions: the role first, then text, then the reason alone."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._maker = _EventMaker(head, "chat.completion.chunk", "chatcmpl")
        self._begun: set[int] = set()

    def events(self, chunk: TextChunk) -> bytes:
        return "".join(self._events(chunk)).encode()

    def _events(self, chunk: TextChunk) -> Iterable[str]:
        choice = self._maker.choice
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            yield choice(chunk.index, '"delta":{"role":"assistant","content":""}', None, (), None)
        if _says_something(self._head, chunk):
            content = f'"delta":{{"content":{_dump(chunk.text)}}}'
            yield choice(chunk.index, content, None, chunk.token_ids, self._logprobs(chunk))
        if chunk.finish_reason:
            yield choice(chunk.index, '"delta":{}', chunk.finish_reason.value, (), None)

    def usage_event(self, usage: Usage) -> bytes:
        return self._maker.usage(usage)

    def whole(self, choices: Sequence[TextChunk], usage: Usage) -> bytes:
        rows = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice),
                "finish_reason": _reason(choice.finish_reason),
                **_token_ids(self._head, choice),
            }
            for choice in choices
        ]
        return _whole({**self._maker.identity, "object": "chat.completion"}, rows, usage)

    def _logprobs(self, chunk: TextChunk) -> dict[str, Any] | None:
        if not (self._head.logprobs and chunk.logprobs):
            return None
        content = [
            {
                **_chat_token(entry.piece, entry.logprob),
                "top_logprobs": [_chat_token(piece, logprob) for piece, logprob in entry.top],
            }
            for entry in chunk.logprobs
        ]
        return {"content": content, "refusal": None}


def _chat_token(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _token_text(piece), "logprob": _number(logprob), "bytes": list(piece)}


def _top_by_text(entry: LogprobEntry) -> dict[str, float] | None:
    """The likeliest tokens, likeliest first, and the one that was taken. Of tokens with equal text
    the likeliest."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for piece, logprob in (*entry.top, (entry.piece, entry.logprob)):
        found.setdefault(_token_text(piece), max(logprob, MIN_LOGPROB))
    return found


def _token_text(piece: bytes) -> str:
    r"""A token's text; bytes that are no whole character are written as in \xf0\x9f."""
    return piece.decode(errors="backslashreplace")


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def _says_something(head: ReplyHead, chunk: TextChunk) -> bool:
    """Beside a finish reason."""
    return bool(chunk.text or ((head.return_token_ids or head.logprobs) and chunk.token_ids))


def _token_ids(head: ReplyHead, choice: TextChunk) -> dict[str, list[int]]:
    return {"token_ids": list(choice.token_ids)} if head.return_token_ids else {}


def _whole(identity: dict[str, Any], rows: list[dict[str, Any]], usage: Usage) -> bytes:
    return _dump({**identity, "choices": rows, "usage": usage.as_json()}).encode()
