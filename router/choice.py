"""One choice of a reply as text: tokens in from `generate`, text out, cut at stop strings.

Also where a request's Lifetime begins and ends, whatever way it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from core.errors import InternalError, TwostrokeError
from core.lifetime import Lifetime
from core.request import FinishReason, GenerateRequest
from router.generate import Fleet, generate
from router.text_stream import TextStream

MAX_WAITING_CHUNKS = 64
"""Chunks of several choices that wait for a slow reader before their choices wait too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """What one choice needs: where it stands in the reply, what to generate, how to write it."""

    index: int
    request: GenerateRequest
    open_text: Callable[[], TextStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """New text of one choice; maybe empty while a character or a stop string is incomplete."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class LifetimeObserver:
    """Sees a request's life as it happens. The base sees nothing."""

    def began(self, life: Lifetime) -> None: ...

    def tokens(self, life: Lifetime, num_tokens: int, gap_s: float | None) -> None:
        """`gap_s`: since the tokens before; None for the first."""

    def ended(self, life: Lifetime) -> None: ...


async def write_choice(
    choice: ChoiceRequest,
    life: Lifetime,
    fleet: Fleet,
    observer: LifetimeObserver,
    *,
    deadline: float,
) -> AsyncGenerator[TextChunk, None]:
    """Text of one choice; the last chunk has the finish reason. Raises TwostrokeError."""
    text_stream = choice.open_text()
    observer.began(life)
    last = None
    try:
        async with aclosing(generate(choice.request, fleet, life, deadline=deadline)) as chunks:
            async for chunk in chunks:
                now = time.monotonic()
                observer.tokens(life, len(chunk.token_ids), None if last is None else now - last)
                last = now
                text = text_stream.push(chunk.token_ids)
                reason = FinishReason.STOP if text_stream.stopped else chunk.finish_reason
                if reason is not None:
                    text += text_stream.finish()
                    reason = FinishReason.STOP if text_stream.stopped else reason
                    life.outcome = reason.value
                yield TextChunk(
                    index=choice.index, text=text, token_ids=chunk.token_ids, finish_reason=reason
                )
                if reason is not None:
                    return
        raise InternalError("the tokens ended without a reason")
    except TwostrokeError as error:
        life.outcome = error.code
        raise
    except Exception:  # a bug; whoever tells the client logs it
        life.outcome = InternalError.code
        raise
    finally:
        if life.outcome == "running":
            life.outcome = "aborted"
        life.finished = time.monotonic()
        observer.ended(life)


async def merge(
    choices: Sequence[AsyncGenerator[TextChunk, None]],
) -> AsyncGenerator[TextChunk, None]:
    """Chunks of all choices as they come. The first error ends all of them and is raised."""
    if len(choices) == 1:
        async with aclosing(choices[0]) as only:
            async for chunk in only:
                yield chunk
        return
    queue: asyncio.Queue[TextChunk | Exception | None] = asyncio.Queue(MAX_WAITING_CHUNKS)
    tasks = [asyncio.create_task(_forward(choice, queue)) for choice in choices]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _forward(
    choice: AsyncGenerator[TextChunk, None], queue: asyncio.Queue[TextChunk | Exception | None]
) -> None:
    try:
        async with aclosing(choice) as chunks:
            async for chunk in chunks:
                await queue.put(chunk)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def collect(chunks: AsyncIterator[TextChunk], num_choices: int) -> list[TextChunk]:
    """All of each choice in one chunk, by index."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    token_ids: list[list[int]] = [[] for _ in range(num_choices)]
    reasons: list[FinishReason | None] = [None] * num_choices
    async for chunk in chunks:
        texts[chunk.index].append(chunk.text)
        token_ids[chunk.index] += chunk.token_ids
        reasons[chunk.index] = chunk.finish_reason
    return [
        TextChunk(
            index=index,
            text="".join(texts[index]),
            token_ids=tuple(token_ids[index]),
            finish_reason=reasons[index],
        )
        for index in range(num_choices)
    ]
