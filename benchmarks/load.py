"""A closed-loop load generator for any OpenAI-compatible server, and a seeded workload for it.

Each of C clients sends its next request when the one before has ended. Prompts are token ids drawn
with a fixed seed, so lengths are exact, runs are repeatable and no text needs to be shipped.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx


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


async def ask(client: httpx.AsyncClient, url: str, model: str, wanted: Ask) -> Outcome:
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
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            outcome.request_id = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                await response.aread()
                outcome.error = f"HTTP {response.status_code}: {response.text[:200]}"
                return outcome
            async for line in response.aiter_lines():
                _take(outcome, line)
    except httpx.HTTPError as error:
        outcome.error = repr(error)
    return outcome


def _take(outcome: Outcome, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line[6:])
    if "error" in event:
        outcome.error = event["error"]["message"]
    elif event.get("usage"):
        outcome.num_output_tokens = event["usage"]["completion_tokens"]
    else:
        outcome.arrivals.append(time.perf_counter())


async def closed_loop(
    url: str, model: str, asks: list[Ask], num_streams: int, timeout_s: float = 600.0
) -> tuple[list[Outcome], float]:
    """All outcomes, and the seconds from the first send to the last byte."""
    todo = iter(asks)
    outcomes: list[Outcome] = []

    async def client_loop() -> None:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
            for wanted in todo:
                outcomes.append(await ask(client, url, model, wanted))

    started = time.perf_counter()
    await asyncio.gather(*(client_loop() for _ in range(num_streams)))
    return outcomes, time.perf_counter() - started
