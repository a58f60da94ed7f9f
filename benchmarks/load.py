"""A closed-loop load generator for any OpenAI-compatible server, and seeded workloads for it.

Each of C clients sends its next request when the one before has ended. Prompts are token ids chosen
with a fixed seed, so lengths are exact and runs are repeatable. The client shares the machine with
the server it measures, so it speaks HTTP over bare asyncio streams: httpx takes several times the
CPU per streamed token. Every request has a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a workload. Lengths in tokens."""

    prompt: tuple[int, ...]
    num_output_tokens: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the client saw. Seconds; `arrivals` are the times of each streamed piece of text."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    request_id: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.num_output_tokens - 1)


def workload(
    *,
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    vocab_size: int = 49152,
    num_shared_tokens: int = 0,
    seed: int = 0,
) -> list[Ask]:
    """Lengths uniform in the given (low, high) ranges; all prompts start with the same
    `num_shared_tokens` tokens. Ids below 100 are left out: special tokens live there."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(100, vocab_size) for _ in range(num_shared_tokens))
    asks = []
    for _ in range(num_requests):
        length = rng.randint(*prompt_tokens)
        own = tuple(rng.randrange(100, vocab_size) for _ in range(length))
        asks.append(Ask(prompt=shared + own, num_output_tokens=rng.randint(*output_tokens)))
    return asks


def text_workload(
    token_ids: Sequence[int],
    *,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    num_shared_tokens: int = 0,
    seed: int = 0,
) -> list[Ask]:
    """Prompts cut from a tokenized text at different places: answers to text are text, where those
    to random tokens are often bytes that no server can show. All start with the same
    `num_shared_tokens` tokens."""
    rng = random.Random(seed)
    last = len(token_ids) - max(prompt_tokens, num_shared_tokens)
    begin = rng.randrange(last)
    shared = tuple(token_ids[begin : begin + num_shared_tokens])
    return [
        Ask(
            prompt=shared + tuple(token_ids[start : start + prompt_tokens]),
            num_output_tokens=output_tokens,
        )
        for start in rng.sample(range(last), num_requests)
    ]


async def ask(url: str, model: str, wanted: Ask) -> Outcome:
    """Stream one completion and stamp every piece."""
    body = {
        "model": model,
        "prompt": list(wanted.prompt),
        "max_tokens": wanted.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    outcome = Outcome(sent=time.perf_counter())
    try:
        await _stream(f"{url}/v1/completions", json.dumps(body).encode(), outcome)
    except (OSError, EOFError, ValueError) as error:
        outcome.error = repr(error)
    if outcome.error is None and not outcome.arrivals:
        outcome.error = "no text came"
    return outcome


async def _stream(url: str, body: bytes, outcome: Outcome) -> None:
    """Raises OSError, EOFError or ValueError where the answer is not whole HTTP."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    try:
        head = (
            f"POST {target.path} HTTP/1.1\r\nHost: {target.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status, headers = await _read_head(reader)
        outcome.request_id = headers.get("x-request-id", "")
        if status != 200:
            outcome.error = f"HTTP {status}: {(await reader.read(200)).decode(errors='replace')}"
            return
        async for line in _lines(
            reader, is_chunked="chunked" in headers.get("transfer-encoding", "")
        ):
            _take(outcome, line)
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    pairs = (line.partition(":") for line in lines if line)
    _, code, *_ = status.split()
    return int(code), {key.lower(): value.strip() for key, _, value in pairs}


async def _lines(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    """Whole lines of the body; the edges of chunks may lie anywhere in them."""
    rest = b""
    while True:
        if is_chunked:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = (await reader.readexactly(size + 2))[:size]
        else:
            piece = await reader.read(1 << 16)
        if not piece:
            return
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line


def _take(outcome: Outcome, line: bytes) -> None:
    data = line.removeprefix(b"data: ").strip()
    if data == line.strip() or data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        outcome.error = event["error"]["message"]
    elif event.get("usage"):
        outcome.num_output_tokens = event["usage"]["completion_tokens"]
    else:
        outcome.arrivals.append(time.perf_counter())


async def closed_loop(
    url: str, model: str, asks: list[Ask], num_streams: int, timeout_s: float = 600.0
) -> tuple[list[Outcome], float]:
    """Outcomes, and the seconds from the first send to the last byte. After `timeout_s` the rest is
    cut off and has no outcome."""
    todo = iter(asks)
    outcomes: list[Outcome] = []

    async def client_loop() -> None:
        for wanted in todo:
            outcomes.append(await ask(url, model, wanted))

    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(client_loop() for _ in range(num_streams)))
    except TimeoutError:
        pass  # the number of outcomes tells
    return outcomes, time.perf_counter() - started


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
