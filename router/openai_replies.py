"""What OpenAI clients read: whole replies and stream events, as bytes. Knows no workers.

Stream events are made by hand, since one is made per token: what is equal in all events of a
request is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from core.request import FinishReason
from router.choice import TextChunk

DONE = b"data: [DONE]\n\n"


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

    def choice(self, index: int, content: str, reason: str | None, token_ids: Sequence[int]) -> str:
        """`content` is the JSON of the endpoint's own field."""
        ids = f',"token_ids":{_dump(list(token_ids))}' if self._head.return_token_ids else ""
        return (
            f'{self._before}{{"index":{index},{content},"logprobs":null,'
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
        if not (chunk.text or chunk.finish_reason or self._head.return_token_ids):
            return b""
        content = f'"text":{_dump(chunk.text)}'
        reason = _reason(chunk.finish_reason)
        return self._maker.choice(chunk.index, content, reason, chunk.token_ids).encode()

    def usage_event(self, usage: Usage) -> bytes:
        return self._maker.usage(usage)

    def whole(self, choices: Sequence[TextChunk], usage: Usage) -> bytes:
        rows = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": None,
                "finish_reason": _reason(choice.finish_reason),
                **_token_ids(self._head, choice),
            }
            for choice in choices
        ]
        return _whole(self._maker.identity, rows, usage)


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
            yield choice(chunk.index, '"delta":{"role":"assistant","content":""}', None, ())
        if chunk.text or (self._head.return_token_ids and chunk.token_ids):
            content = f'"delta":{{"content":{_dump(chunk.text)}}}'
            yield choice(chunk.index, content, None, chunk.token_ids)
        if chunk.finish_reason:
            yield choice(chunk.index, '"delta":{}', chunk.finish_reason.value, ())

    def usage_event(self, usage: Usage) -> bytes:
        return self._maker.usage(usage)

    def whole(self, choices: Sequence[TextChunk], usage: Usage) -> bytes:
        rows = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": _reason(choice.finish_reason),
                **_token_ids(self._head, choice),
            }
            for choice in choices
        ]
        return _whole({**self._maker.identity, "object": "chat.completion"}, rows, usage)


def _token_ids(head: ReplyHead, choice: TextChunk) -> dict[str, list[int]]:
    return {"token_ids": list(choice.token_ids)} if head.return_token_ids else {}


def _whole(identity: dict[str, Any], rows: list[dict[str, Any]], usage: Usage) -> bytes:
    return _dump({**identity, "choices": rows, "usage": usage.as_json()}).encode()
