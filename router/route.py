"""One request's way over the workers: which to try next, after what has gone wrong so far.

Owns the memory of failures and decides when there have been enough; the choice itself is
`router.policy`'s. The rules:
- a worker that died under the request is not used for it again, and after two of them the request
  itself is the suspect: it gets no third victim;
- a pair whose layouts differ is not tried again;
- after a failed transfer both ends are avoided while others are left;
- preemption is no failure: each attempt yields at least one token, so it ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from core.errors import (
    HandshakeRefusedError,
    InternalError,
    PreemptedError,
    RetryableError,
    TransferError,
    WorkerLostError,
    WorkerUnavailableError,
)
from core.prefix import BlockHash, hash_blocks, hash_root
from core.request import GenerateRequest
from core.worker import WorkerId, WorkerRole
from router.policy import WorkerSnapshot, choose_decode, choose_prefill, num_uncached_tokens
from router.prefix_index import PrefixIndex
from router.registry import WorkerRegistry

MAX_DEATHS = 2


class PrefillChoice(NamedTuple):
    worker_id: WorkerId
    role: WorkerRole
    """COLOCATED: it decodes too."""
    num_uncached_tokens: int
    """What it is expected to compute."""
    num_cached_tokens: int
    """What it is expected to find in its cache: compared later with the worker's own count."""


class Route:
    """`prefill` and `decode` say where the request is or was last; None before the choice. A
    colocated worker is `prefill` all the time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        index: PrefixIndex,
        *,
        max_attempts: int,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._index = index
        self._max_attempts = max_attempts
        self._clock = clock
        self._num_failures = 0
        self._last_error: RetryableError | None = None
        self._dead: set[WorkerId] = set()
        self._avoided: set[WorkerId] = set()
        self._refused: set[tuple[WorkerId, WorkerId]] = set()
        self._hashes: dict[tuple[str, int], Sequence[BlockHash]] = {}
        self.prefill: WorkerId | None = None
        self.decode: WorkerId | None = None

    def choose_prefill(self, request: GenerateRequest) -> PrefillChoice:
        """Raises WorkerUnavailableError, also when no decode worker could go on afterwards."""
        self.prefill = self.decode = None
        self._hashes.clear()
        role = self._registry.roles[0]
        workers = self._registry.snapshots(role)
        refused = set() if role is WorkerRole.COLOCATED else self._without_decode(request, workers)
        num_tokens = len(request.token_ids)
        matched = self._match(request, workers)
        chosen = choose_prefill(
            workers,
            num_tokens=num_tokens,
            matched=matched,
            exclude=self._dead | refused,
            avoid=self._avoided,
            rotation=self._registry.next_rotation(role),
            role=role,
        )
        self.prefill = chosen.worker_id
        self._index.expect(chosen.worker_id, self._hashes_for(request, chosen), self._clock())
        uncached = num_uncached_tokens(chosen, num_tokens, matched.get(chosen.worker_id, 0))
        return PrefillChoice(chosen.worker_id, role, uncached, num_tokens - uncached)

    def _without_decode(
        self, request: GenerateRequest, workers: Sequence[WorkerSnapshot]
    ) -> set[WorkerId]:
        """Prefill workers from which no decode worker could go on."""
        decoders = [w.worker_id for w in self._registry.snapshots(WorkerRole.DECODE)]
        usable = [d for d in decoders if d not in self._dead]
        if not usable and request.num_remaining_tokens > 1:
            raise WorkerUnavailableError("no decode worker is connected")
        return {
            worker.worker_id
            for worker in workers
            if usable and all((worker.worker_id, d) in self._refused for d in usable)
        }

    def choose_decode(self, request: GenerateRequest) -> WorkerId:
        """Chosen with fresh load, after prefill. Raises WorkerUnavailableError."""
        workers = self._registry.snapshots(WorkerRole.DECODE)
        refused = {d for p, d in self._refused if p == self.prefill}
        chosen = choose_decode(
            workers,
            num_tokens=len(request.token_ids),
            matched=self._match(request, workers),
            exclude=self._dead | refused,
            avoid=self._avoided,
            rotation=self._registry.next_rotation(WorkerRole.DECODE),
        )
        self.decode = chosen.worker_id
        return chosen.worker_id

    def failed(self, error: RetryableError) -> None:
        """Learn from `error`. Raises it, or what it amounts to, when trying again is no use."""
        where = self.decode or self.prefill
        if where is None:
            # Nobody is left to try; what went wrong before tells the client more than that.
            raise self._last_error or error
        self._last_error = error
        if isinstance(error, WorkerLostError):
            self._dead.add(where)
            if len(self._dead) >= MAX_DEATHS:
                raise InternalError(
                    f"{len(self._dead)} workers died while they ran this request; "
                    "it is not tried again"
                ) from error
        if isinstance(error, HandshakeRefusedError) and self.prefill and self.decode:
            self._refused.add((self.prefill, self.decode))
        elif isinstance(error, TransferError):
            self._avoided |= {w for w in (self.prefill, self.decode) if w}
        if not isinstance(error, PreemptedError):
            self._num_failures += 1
        if self._num_failures >= self._max_attempts:
            raise error

    def _match(
        self, request: GenerateRequest, workers: Sequence[WorkerSnapshot]
    ) -> dict[WorkerId, int]:
        """Leading blocks each worker holds, by its own block size and model."""
        matched: dict[WorkerId, int] = {}
        now = self._clock()
        for layout, hashes in {
            (w.model_fingerprint, w.block_size): self._hashes_for(request, w) for w in workers
        }.items():
            found = self._index.match(hashes, now)
            alike = {w.worker_id for w in workers if (w.model_fingerprint, w.block_size) == layout}
            matched |= {w: num_blocks for w, num_blocks in found.items() if w in alike}
        return matched

    def _hashes_for(self, request: GenerateRequest, worker: WorkerSnapshot) -> Sequence[BlockHash]:
        """Hashes of the request's full blocks, computed once per attempt and kind of worker."""
        key = (worker.model_fingerprint, worker.block_size)
        if key not in self._hashes:
            root = hash_root(model=worker.model_fingerprint, salt=request.cache_salt)
            self._hashes[key] = hash_blocks(request.token_ids, worker.block_size, root)
        return self._hashes[key]
