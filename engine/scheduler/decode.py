"""Writes answers: every running sequence computes its newest token in every step.

Sequences grow by one block at a time, and a block that several share is copied before one of them
writes to it. When the pool has none left, the last in order (lowest priority, youngest) give theirs
back (recompute later, through the prefix cache), so the first in order always goes on.
"""

from __future__ import annotations

from bisect import insort_right
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from engine.batch import BlockCopy, ScheduledSequence, SequenceResult
from engine.block_pool import BlockPool
from engine.sequence import Sequence


class DecodeStep(NamedTuple):
    shares: list[ScheduledSequence]
    preempted: list[Sequence]
    """Out of the scheduler, blocks free; the caller decides where they go on."""
    block_copies: list[BlockCopy]


class DecodeScheduler:
    """Sequences enter with the KV of all but their newest token computed."""

    def __init__(self, pool: BlockPool, max_model_len: int) -> None:
        self._pool = pool
        self._max_model_len = max_model_len
        self.running: list[Sequence] = []
        """In order of `Sequence.order`."""
        self.num_used_at_preemption: int | None = None
        """Blocks in use when one first had to be taken away: the lowest such count."""

    def add(self, sequence: Sequence) -> None:
        assert sequence.num_uncomputed_tokens == 1, f"{sequence.key} is not ready to decode"
        insort_right(self.running, sequence, key=attrgetter("order"))

    def schedule(self) -> DecodeStep:
        preempted: list[Sequence] = []
        copies: list[BlockCopy] = []
        ready: list[Sequence] = []
        queue = deque(self.running)
        while queue:
            sequence = queue.popleft()
            while not self._make_room(sequence, copies):
                self._note_shortage()
                victim = queue.pop() if queue else sequence
                victim.release(self._pool)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                ready.append(sequence)
        self.running = ready
        preempted.reverse()  # in order, as they will be queued again
        return DecodeStep([sequence.scheduled(1) for sequence in ready], preempted, copies)

    def _make_room(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """A block of its own for the KV of the newest token. False changes nothing."""
        if self._has_room(sequence):
            return True
        new = self._pool.allocate(1)
        if new is None:
            return False
        index = sequence.num_computed_tokens // self._pool.block_size
        if index == len(sequence.block_ids):
            sequence.block_ids += new
        else:  # copy on write; the other owners keep the source until after this step
            source = sequence.block_ids[index]
            copies.append(BlockCopy(source, new[0]))
            self._pool.free([source])
            sequence.block_ids[index] = new[0]
        return True

    def _has_room(self, sequence: Sequence) -> bool:
        index = sequence.num_computed_tokens // self._pool.block_size
        grows = index == len(sequence.block_ids)
        return not grows and self._pool.is_exclusive(sequence.block_ids[index])

    def _note_shortage(self) -> None:
        used = self._pool.num_blocks - self._pool.num_available
        self.num_used_at_preemption = min(used, self.num_used_at_preemption or used)

    def less_important_than(self, sequence: Sequence) -> list[Sequence]:
        """Those of a lower priority, the last in order last."""
        return [s for s in self.running if s.request.priority > sequence.request.priority]

    def preempt(self, sequence: Sequence) -> None:
        """Out of the scheduler, blocks free; the caller decides where it goes on."""
        self.running.remove(sequence)
        sequence.release(self._pool)

    def num_blocks_wanted(self, sequences: Iterable[Sequence]) -> int:
        """How many blocks these will take in the next step, to grow or to copy."""
        return sum(not self._has_room(sequence) for sequence in sequences)

    def has(self, request_id: str) -> bool:
        return any(sequence.request.request_id == request_id for sequence in self.running)

    def update(
        self, shares: list[ScheduledSequence], results: tuple[SequenceResult, ...]
    ) -> list[Sequence]:
        """Take the step's tokens, in order. Returns the sequences that got one (or an error). Those
        that ended are no longer here and their blocks are free; beams, which get candidates and no
        token, are not here either and keep their blocks."""
        by_key = {sequence.sequence_key: sequence for sequence in self.running}
        stepped: list[Sequence] = []
        some_left = False
        for share, result in zip(shares, results, strict=True):
            sequence = by_key.get(share.sequence_key)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.computed(1, result, self._pool)
            if sequence.error is None:
                sequence.take(result.sampled[0], self._max_model_len)
            stepped.append(sequence)
            if sequence.ended:
                sequence.release(self._pool)
            some_left = some_left or sequence.ended or not sequence.num_uncomputed_tokens
        if some_left:
            self.running = [s for s in self.running if s.num_uncomputed_tokens and not s.ended]
        return stepped

    def abort(self, request_id: str, attempt: int) -> list[Sequence]:
        """Remove the request's sequences and free their blocks."""
        gone = [s for s in self.running if s.key == (request_id, attempt)]
        self.running = [s for s in self.running if s.key != (request_id, attempt)]
        for sequence in gone:
            sequence.release(self._pool)
        return gone
