"""The life of a request: choose, prefill, yield, choose, decode, yield; what breaks goes again.

A colocated worker does both strokes, so there the second choice falls away.
A request with its tokens so far is a complete value, so there is one recovery path for preemption,
a dead worker, a lost transfer and an expired lease: `with_output`, and from the top. Promises that
every request ends (last token, error, or the deadline), that no token is given twice, and that
whenever it ends, also by `aclose`, nothing of it stays on any worker.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from core.errors import DeadlineExceededError, InternalError, RetryableError
from core.lifetime import Lifetime
from core.request import GenerateRequest, SequenceOutput
from core.worker import WorkerId, WorkerRole
from router.prefix_index import PrefixIndex
from router.registry import WorkerRegistry
from router.route import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What `generate` needs to know of the world."""

    registry: WorkerRegistry
    index: PrefixIndex
    max_attempts: int
    on_retry: Callable[[RetryableError], None]


async def generate(
    request: GenerateRequest, fleet: Fleet, life: Lifetime, *, deadline: float
) -> AsyncGenerator[SequenceOutput, None]:
    """What workers say of `request`: new tokens as they come, each once; `life` is filled in along
    the way.

    `deadline` is a time of time.monotonic(). Raises TwostrokeError. Close it when done early.
    """
    registry, clock = fleet.registry, time.monotonic
    route = Route(registry, fleet.index, max_attempts=fleet.max_attempts, clock=clock)
    output = list(request.output_token_ids)
    while True:
        life.attempts += 1
        try:
            choice = route.choose_prefill(request)
            stamps = Stamps(life, choice.worker_id, choice.num_cached_tokens)
            with registry.submit(
                choice.worker_id, request, timeout_s=time_left(deadline)
            ) as outputs:
                with registry.computing(choice.worker_id, choice.num_uncached_tokens):
                    first = await anext(outputs)
                check_first(first, choice.role)
                stamps.prefilled(first)
                output += first.token_ids
                if choice.role is WorkerRole.COLOCATED:
                    yield first
                    stamps.decode_chosen(choice.worker_id)
                    async for new in outputs:
                        stamps.decoded(new)
                        output += new.token_ids
                        yield new
                    return
            with released_unless_taken(registry, choice.worker_id, request) as handover:
                handover.taken = first.handle is None
                yield first
                if first.handle is None:
                    return
                rest = replace(request, output_token_ids=tuple(output))
                worker_id = route.choose_decode(rest)
                stamps.decode_chosen(worker_id)
                with registry.submit(
                    worker_id, rest, first.handle, timeout_s=time_left(deadline)
                ) as outputs:
                    async for new in outputs:
                        handover.taken = True  # its KV has arrived
                        stamps.decoded(new)
                        output += new.token_ids
                        yield new
            return
        except RetryableError as error:
            life.notes.append(f"{error.code} on {route.decode or route.prefill}: {error}")
            route.failed(error)
            fleet.on_retry(error)
            request = request.with_output(tuple(output))


class Handover:
    """KV that waits at the prefill worker until a decode worker has taken it."""

    taken = False


@contextmanager
def released_unless_taken(
    registry: WorkerRegistry, prefill: WorkerId, request: GenerateRequest
) -> Iterator[Handover]:
    handover = Handover()
    try:
        yield handover
    finally:
        if not handover.taken:
            registry.release(prefill, request.request_id, request.attempt)


def check_first(output: SequenceOutput, role: WorkerRole) -> None:
    """A prefill worker says one thing of a request: the last token of all, or a token and where
    its KV waits. A colocated worker goes on by itself."""
    goes_on = output.finish_reason is None
    if not output.token_ids or (output.handle is not None) != (
        goes_on and role is WorkerRole.PREFILL
    ):
        raise InternalError(f"the {role} worker's answer holds no token or no way to go on")


def time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceededError("the request's time ran out")
    return left


class Stamps:
    """Fills in a Lifetime. The first attempt's times explain TTFT, the last one's the decoding."""

    def __init__(self, life: Lifetime, prefill: WorkerId, num_cached_tokens: int) -> None:
        self._life = life
        life.prefill_worker, life.decode_worker = str(prefill), None
        if life.prefill_sent is None:
            life.prefill_sent = time.monotonic()
            life.predicted_cached_tokens = num_cached_tokens

    def prefilled(self, output: SequenceOutput) -> None:
        life = self._life
        life.first_token = life.first_token or time.monotonic()
        life.prefill = life.prefill or output.prefill_times
        life.num_output_tokens += len(output.token_ids)

    def decode_chosen(self, worker_id: WorkerId) -> None:
        self._life.decode_worker = str(worker_id)
        self._life.decode_sent = self._life.decode_sent or time.monotonic()

    def decoded(self, output: SequenceOutput) -> None:
        life = self._life
        life.second_token = life.second_token or time.monotonic()
        life.num_output_tokens += len(output.token_ids)
        life.decode = output.decode_times or life.decode
