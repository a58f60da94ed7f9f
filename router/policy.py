"""Where a request goes, as pure functions of frozen values. Knows no clock, network or counter.

Reports are some milliseconds old, so each choice also looks at what this router itself has in
flight there: a burst sees its own effect at once. Reported and own load overlap (the worker reports
our requests too), therefore the larger of the two counts and not their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import WorkerUnavailableError
from core.worker import WorkerId, WorkerRole

NO_MATCH: Mapping[WorkerId, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One connected worker as the router knows it at the moment of a choice."""

    worker_id: WorkerId
    role: WorkerRole
    model_fingerprint: str
    """Root of the worker's hash chain; with `block_size` it decides which hashes it can match."""
    block_size: int
    max_num_seqs: int
    num_free_blocks: int
    num_seqs: int
    """Waiting and running, as last reported."""
    num_queued_tokens: int
    """Prompt tokens not yet computed, as last reported."""
    suspect: bool
    """Silent for long although it has work: maybe its step loop hangs."""
    num_in_flight: int
    """Requests this router has there now."""
    num_in_flight_tokens: int
    """Prompt tokens this router sent there that it expected to be computed and not yet answered."""


def num_uncached_tokens(worker: WorkerSnapshot, num_tokens: int, num_matched_blocks: int) -> int:
    """What a prefill there must compute; at least the last token, whose logits are needed."""
    return max(1, num_tokens - num_matched_blocks * worker.block_size)


def choose_prefill(
    workers: Sequence[WorkerSnapshot],
    *,
    num_tokens: int,
    matched: Mapping[WorkerId, int] = NO_MATCH,
    exclude: Collection[WorkerId] = (),
    avoid: Collection[WorkerId] = (),
    rotation: int = 0,
    role: WorkerRole = WorkerRole.PREFILL,
) -> WorkerSnapshot:
    """The worker that will have computed the prompt after the fewest tokens.

    `matched` counts the leading blocks each worker holds. Ties: fewest requests in flight, then
    round robin by `rotation`. Workers in `avoid` and suspects are taken only when no other is
    left, those in `exclude` never. `role` is what the workers are, for the error. Raises
    WorkerUnavailableError.
    """

    def cost(worker: WorkerSnapshot) -> tuple[int, int]:
        uncached = num_uncached_tokens(worker, num_tokens, matched.get(worker.worker_id, 0))
        backlog = max(worker.num_queued_tokens, worker.num_in_flight_tokens)
        return backlog + uncached, worker.num_in_flight

    return _least(workers, cost, role, exclude, avoid, rotation)


def choose_decode(
    workers: Sequence[WorkerSnapshot],
    *,
    num_tokens: int,
    matched: Mapping[WorkerId, int] = NO_MATCH,
    exclude: Collection[WorkerId] = (),
    avoid: Collection[WorkerId] = (),
    rotation: int = 0,
) -> WorkerSnapshot:
    """The worker with room for the sequence and the smallest share of its slots taken.

    Ties: fewest blocks to pull, most free blocks, then round robin by `rotation`. `exclude`,
    `avoid` and suspects as in choose_prefill. Raises WorkerUnavailableError.
    """

    def cost(worker: WorkerSnapshot) -> tuple[bool, float, int, int]:
        num_seqs = max(worker.num_seqs, worker.num_in_flight)
        num_blocks = -(-num_tokens // worker.block_size)
        num_matched = matched.get(worker.worker_id, 0)
        full = num_seqs >= worker.max_num_seqs or num_blocks > worker.num_free_blocks
        return full, num_seqs / worker.max_num_seqs, -num_matched, -worker.num_free_blocks

    return _least(workers, cost, WorkerRole.DECODE, exclude, avoid, rotation)


def _least(
    workers: Sequence[WorkerSnapshot],
    cost: Callable[[WorkerSnapshot], Any],
    role: WorkerRole,
    exclude: Collection[WorkerId],
    avoid: Collection[WorkerId],
    rotation: int,
) -> WorkerSnapshot:
    candidates = [worker for worker in workers if worker.worker_id not in exclude]
    if not candidates:
        others = " that has not failed this request" if workers else ""
        raise WorkerUnavailableError(f"no {role} worker{others} is connected")
    trusted = [w for w in candidates if w.worker_id not in avoid and not w.suspect]
    preferred = trusted or candidates
    start = rotation % len(preferred)
    return min(preferred[start:] + preferred[:start], key=cost)
