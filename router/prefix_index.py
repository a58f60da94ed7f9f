"""Which worker holds which prefix: advice, never truth. The worker itself knows what it has.

Fed by worker reports (a gap in their numbers or a new incarnation clears that worker) and, for a
short time, by the router's own decisions, so that a burst of equal prompts meets on one worker
before its first report. Pure: `now` is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from core.prefix import BlockHash
from core.worker import WorkerId, WorkerReport

SPECULATION_S = 5.0
"""A decision the worker has not confirmed for this long is forgotten."""

MAX_BLOCKS = 1_000_000


class PrefixIndex(Protocol):
    """What routing needs of an index. No call blocks and none raises: at worst nothing matches."""

    def apply(self, worker_id: WorkerId, report: WorkerReport) -> None:
        """Take over what the worker's cache gained and lost."""

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker that is gone or whose stream broke."""

    def expect(self, worker_id: WorkerId, hashes: Sequence[BlockHash], now: float) -> None:
        """A request with these blocks was just sent there."""

    def match(self, hashes: Sequence[BlockHash], now: float) -> dict[WorkerId, int]:
        """How many leading blocks each worker holds; workers without the first are left out."""


class _Guess(NamedTuple):
    expires: float
    worker_id: WorkerId
    block_hash: BlockHash


class MemoryPrefixIndex:
    """The index of one router process. Holds at most `max_blocks` hashes.

    Beyond that the least recently used go. Matching or expecting a chain uses it from its end to
    its start, so the start, which others may share, stays longest. A worker's report adds hashes
    but uses none: chunk by chunk it would make the end of a chain look the youngest.
    """

    def __init__(
        self, *, max_blocks: int = MAX_BLOCKS, speculation_s: float = SPECULATION_S
    ) -> None:
        self._max_blocks = max_blocks
        self._speculation_s = speculation_s
        self._holders: OrderedDict[BlockHash, dict[WorkerId, float]] = OrderedDict()
        """Hash -> worker -> when the entry ends: infinity once the worker reported it."""
        self._blocks: dict[WorkerId, set[BlockHash]] = {}
        """The same entries by worker."""
        self._sequence_numbers: dict[WorkerId, int] = {}
        self._guesses: deque[_Guess] = deque()
        """In the order in which they end; a confirmed one is skipped when its time comes."""

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    def apply(self, worker_id: WorkerId, report: WorkerReport) -> None:
        last = self._sequence_numbers.get(worker_id)
        if last is None:
            self._remove_namesakes(worker_id)
        elif report.sequence_number != last + 1:
            self.remove(worker_id)
        self._sequence_numbers[worker_id] = report.sequence_number
        for block_hash in report.evicted:
            self._discard(worker_id, block_hash)
        for block_hash in reversed(report.stored):  # parents come before children
            self._store(worker_id, block_hash, math.inf)
        self._trim()

    def remove(self, worker_id: WorkerId) -> None:
        self._sequence_numbers.pop(worker_id, None)
        for block_hash in tuple(self._blocks.get(worker_id, ())):
            self._discard(worker_id, block_hash)

    def expect(self, worker_id: WorkerId, hashes: Sequence[BlockHash], now: float) -> None:
        self._expire(now)
        expires = now + self._speculation_s
        for block_hash in hashes:
            if self._holders.get(block_hash, {}).get(worker_id) != math.inf:
                self._store(worker_id, block_hash, expires)
                self._guesses.append(_Guess(expires, worker_id, block_hash))
        self._use(hashes)
        self._trim()

    def match(self, hashes: Sequence[BlockHash], now: float) -> dict[WorkerId, int]:
        self._expire(now)
        matched: dict[WorkerId, int] = {}
        for length, block_hash in enumerate(hashes, start=1):
            holders = self._holders.get(block_hash, {})
            for worker_id in holders:
                if matched.get(worker_id, 0) == length - 1:
                    matched[worker_id] = length
            if length not in matched.values():
                break
        self._use(hashes[: max(matched.values(), default=0)])
        return matched

    def _store(self, worker_id: WorkerId, block_hash: BlockHash, expires: float) -> None:
        self._holders.setdefault(block_hash, {})[worker_id] = expires
        self._blocks.setdefault(worker_id, set()).add(block_hash)

    def _use(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in reversed(hashes):
            self._holders.move_to_end(block_hash)

    def _trim(self) -> None:
        while len(self._holders) > self._max_blocks:
            oldest = next(iter(self._holders))
            for holder in tuple(self._holders[oldest]):
                self._discard(holder, oldest)

    def _discard(self, worker_id: WorkerId, block_hash: BlockHash) -> None:
        holders, blocks = self._holders.get(block_hash), self._blocks.get(worker_id)
        if holders is None or blocks is None or holders.pop(worker_id, None) is None:
            return
        blocks.discard(block_hash)
        if not holders:
            del self._holders[block_hash]
        if not blocks:
            del self._blocks[worker_id]

    def _expire(self, now: float) -> None:
        while self._guesses and self._guesses[0].expires <= now:
            guess = self._guesses.popleft()
            if self._holders.get(guess.block_hash, {}).get(guess.worker_id) == guess.expires:
                self._discard(guess.worker_id, guess.block_hash)

    def _remove_namesakes(self, worker_id: WorkerId) -> None:
        """Earlier incarnations, whose end was not seen."""
        for other in tuple({*self._blocks, *self._sequence_numbers}):
            if other.name == worker_id.name and other != worker_id:
                self.remove(other)
