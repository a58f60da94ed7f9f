"""Writes answers: every running sequence computes its newest token in every step.

Sequences grow by one block at a time. When the pool has none left, the youngest give theirs back
(recompute later, through the prefix cache), so the oldest always goes on.
"""

from __future__ import annotations

from typing import NamedTuple

from core.config import SchedulerConfig
from engine.batch import ScheduledSequence
from engine.block_pool import BlockPool
from engine.sequence import Sequence


class DecodeStep(NamedTuple):
    shares: list[ScheduledSequence]
    preempted: list[Sequence]
    """Out of the scheduler, blocks free; the caller decides where they go on."""


class DecodeScheduler:
    """Sequences enter with the KV of all but their newest token computed."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, max_model_len: int) -> None:
        self._config = config
        self._pool = pool
        self._max_model_len = max_model_len
        self.running: list[Sequence] = []
        """Oldest first."""

    def add(self, sequence: Sequence) -> None:
        assert sequence.num_uncomputed_tokens == 1, f"{sequence.key} is not ready to decode"
        self.running.append(sequence)

    def schedule(self) -> DecodeStep:
        preempted: list[Sequence] = []
        ready: list[Sequence] = []
        queue = self.running
        while queue:
            sequence, queue = queue[0], queue[1:]
            while not self._grow(sequence):
                victim = queue.pop() if queue else sequence
                victim.release(self._pool)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                ready.append(sequence)
        self.running = ready
        preempted.reverse()  # oldest first, as they will be queued again
        return DecodeStep([sequence.scheduled(1) for sequence in ready], preempted)

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the KV of the newest token."""
        if len(sequence.block_ids) * self._pool.block_size > sequence.num_computed_tokens:
            return True
        new = self._pool.allocate(1)
        if new is None:
            return False
        sequence.block_ids += new
        return True

    def update(
        self, shares: list[ScheduledSequence], token_ids: tuple[int | None, ...]
    ) -> list[Sequence]:
        """Take the step's tokens, in order. Returns the sequences that got one (or an error); those
        that ended are no longer here and their blocks are free."""
        by_key = {sequence.key: sequence for sequence in self.running}
        stepped: list[Sequence] = []
        for share, token_id in zip(shares, token_ids, strict=True):
            sequence = by_key.get(share.key)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.num_computed_tokens += 1
            sequence.num_steps += 1
            sequence.cache_full_blocks(self._pool)
            sequence.take(token_id, self._max_model_len)
            stepped.append(sequence)
            if sequence.ended:
                sequence.release(self._pool)
        self.running = [s for s in self.running if not s.ended]
        return stepped

    def abort(self, request_id: str, attempt: int) -> Sequence | None:
        """Remove the sequence and free its blocks. None when it is not here."""
        for sequence in self.running:
            if sequence.key == (request_id, attempt):
                self.running.remove(sequence)
                sequence.release(self._pool)
                return sequence
        return None
