"""One choice of a reply as text: tokens in from `generate`, text and log probabilities out, cut at
stop strings.

Also where a request's Lifetime begins and ends, whatever way it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from core.errors import InternalError, TwostrokeError
from core.lifetime import Lifetime
from core.request import FinishReason, GenerateRequest, SequenceOutput, TokenLogprobs
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
    token_bytes: Callable[[int], bytes]
    echo: Echo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompt, to be given before the output."""

    text: str
    offsets: Sequence[int]
    """Where in it each prompt token begins, characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """One token of the reply, as the client sees it."""

    piece: bytes
    """Its raw bytes, maybe only a part of a character."""
    logprob: float | None
    """None for the first prompt token: nothing comes before it."""
    top: tuple[tuple[bytes, float], ...]
    """The likeliest tokens' bytes and log probabilities, likeliest first."""
    text_offset: int
    """Characters of the reply's text before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """New text of one choice; maybe empty while a character or a stop string is incomplete."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Output tokens, the one that completed a stop string being the last."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[LogprobEntry, ...] = ()
    """Where asked for: one per token of `token_ids`, after those of an echoed prompt."""

    @property
    def mean_logprob(self) -> float:
        """Of the output tokens, whose log probabilities must have been asked for."""
        output = self.logprobs[-len(self.token_ids) :]
        return sum(entry.logprob or 0.0 for entry in output) / len(output)


class ChoiceText:
    """Makes the chunks of one choice out of what workers say of it."""

    def __init__(self, choice: ChoiceRequest) -> None:
        self._choice = choice
        self._stream = choice.open_text()
        self._echo = choice.echo
        self._num_echoed_chars = len(choice.echo.text) if choice.echo else 0

    def write(self, output: SequenceOutput) -> TextChunk:
        """The last chunk has the finish reason; nothing may come after it."""
        stream, wanted = self._stream, self._choice.request.sampling.logprobs is not None
        _require_logprobs(output.logprobs, len(output.token_ids) if wanted else 0)
        text, entries = self._begin(output)
        num_tokens = 0
        for token_id in output.token_ids:
            if wanted:
                offset = self._num_echoed_chars + stream.num_chars
                entries.append(self._entry(output.logprobs[num_tokens], offset))
            text += stream.push((token_id,))
            num_tokens += 1
            if stream.stopped:
                break
        reason = FinishReason.STOP if stream.stopped else output.finish_reason
        if reason is not None:
            text += stream.finish()
            reason = FinishReason.STOP if stream.stopped else reason
        return TextChunk(
            index=self._choice.index,
            text=text,
            token_ids=output.token_ids[:num_tokens],
            finish_reason=reason,
            logprobs=tuple(entries),
        )

    def _begin(self, output: SequenceOutput) -> tuple[str, list[LogprobEntry]]:
        """The echo, once, with the first output."""
        echo, self._echo = self._echo, None
        if echo is None:
            return "", []
        request = self._choice.request
        if request.sampling.prompt_logprobs is None:
            return echo.text, []
        _require_logprobs(output.prompt_logprobs, len(request.prompt_token_ids) - 1)
        piece = self._choice.token_bytes(request.prompt_token_ids[0])
        first = LogprobEntry(piece=piece, logprob=None, top=(), text_offset=0)
        return echo.text, [first, *map(self._entry, output.prompt_logprobs, echo.offsets[1:])]

    def _entry(self, logprobs: TokenLogprobs, text_offset: int) -> LogprobEntry:
        token_bytes = self._choice.token_bytes
        return LogprobEntry(
            piece=token_bytes(logprobs.token_id),
            logprob=logprobs.logprob,
            top=tuple((token_bytes(token_id), value) for token_id, value in logprobs.top),
            text_offset=text_offset,
        )


def _require_logprobs(logprobs: Sequence[TokenLogprobs], count: int) -> None:
    if len(logprobs) < count:
        raise InternalError(f"{len(logprobs)} log probabilities came for {count} tokens")


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
    writer = ChoiceText(choice)
    observer.began(life)
    last = None
    try:
        async with aclosing(generate(choice.request, fleet, life, deadline=deadline)) as outputs:
            async for output in outputs:
                now = time.monotonic()
                observer.tokens(life, len(output.token_ids), None if last is None else now - last)
                last = now
                chunk = writer.write(output)
                if chunk.finish_reason is not None:
                    life.outcome = chunk.finish_reason.value
                yield chunk
                if chunk.finish_reason is not None:
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


def merge(
    choices: Sequence[AsyncGenerator[TextChunk, None]],
) -> AsyncGenerator[TextChunk, None]:
    """Chunks of all choices as they come. The first error ends all of them and is raised."""
    return choices[0] if len(choices) == 1 else _merge(choices)


async def _merge(
    choices: Sequence[AsyncGenerator[TextChunk, None]],
) -> AsyncGenerator[TextChunk, None]:
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
    logprobs: list[list[LogprobEntry]] = [[] for _ in range(num_choices)]
    reasons: list[FinishReason | None] = [None] * num_choices
    async for chunk in chunks:
        texts[chunk.index].append(chunk.text)
        token_ids[chunk.index] += chunk.token_ids
        logprobs[chunk.index] += chunk.logprobs
        reasons[chunk.index] = chunk.finish_reason
    return [
        TextChunk(
            index=index,
            text="".join(texts[index]),
            token_ids=tuple(token_ids[index]),
            finish_reason=reasons[index],
            logprobs=tuple(logprobs[index]),
        )
        for index in range(num_choices)
    ]


def pick_best(choices: Sequence[TextChunk], *, best_of: int, n: int) -> list[TextChunk]:
    """Of every `best_of` whole choices the `n` with the highest mean log probability per token,
    best first, numbered anew."""
    picked: list[TextChunk] = []
    for start in range(0, len(choices), best_of):
        group = choices[start : start + best_of]
        picked += sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)[:n]
    return [replace(choice, index=index) for index, choice in enumerate(picked)]
