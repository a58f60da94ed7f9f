"""Reads prompts: first come, first served, in chunks under a token budget.

A sequence gets blocks for its whole prompt when it is admitted, so two half-read prompts can never
wait for each other; one that does not fit waits at the head and blocks what came later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from core.config import SchedulerConfig
from engine.batch import ScheduledSequence
from engine.block_pool import BlockPool
from engine.sequence import Sequence


class PrefillScheduler:
    """Sequences leave it when their next token was sampled, on finish or on abort."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, max_model_len: int) -> None:
        self._config = config
        self._pool = pool
        self._max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens still to be computed."""
        sequences: Iterable[Sequence] = (*self.waiting, *self.running)
        return sum(sequence.num_uncomputed_tokens for sequence in sequences)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """`first` puts a preempted sequence before what arrived later."""
        self.waiting.appendleft(sequence) if first else self.waiting.append(sequence)

    def schedule(
        self, now: float, *, num_reserved_tokens: int = 0, num_reserved_blocks: int = 0
    ) -> list[ScheduledSequence]:
        """Shares of one step: chunks of running prompts first, then new ones while they fit.

        `num_reserved_tokens` of the budget and `num_reserved_blocks` of the pool are spoken for by
        the decode side of a colocated engine.
        """
        budget = self._config.max_num_batched_tokens - num_reserved_tokens
        shares: list[ScheduledSequence] = []
        for sequence in self.running:
            if budget <= 0:
                break
            budget -= self._take(sequence, budget, shares)
        while budget > 0 and self.waiting and len(self.running) < self._config.max_num_seqs:
            if not self._admit(self.waiting[0], num_reserved_blocks):
                break
            sequence = self.waiting.popleft()
            if sequence.first_scheduled is None:
                sequence.first_scheduled = now
            self.running.append(sequence)
            budget -= self._take(sequence, budget, shares)
        return shares

    def _take(self, sequence: Sequence, budget: int, shares: list[ScheduledSequence]) -> int:
        num_tokens = min(budget, sequence.num_uncomputed_tokens)
        shares.append(sequence.scheduled(num_tokens))
        return num_tokens

    def _admit(self, sequence: Sequence, num_reserved_blocks: int) -> bool:
        """Blocks for all known tokens: cached ones shared, others new. False changes nothing."""
        pool = self._pool
        num_tokens = len(sequence.token_ids)
        # The last token is always computed, since its logits are what is wanted.
        hashes = sequence.hashes((num_tokens - 1) // pool.block_size, pool.block_size)
        cached = pool.match_prefix(hashes)
        num_new = pool.num_blocks_for(num_tokens) - len(cached)
        if num_new + pool.num_idle(cached) + num_reserved_blocks > pool.num_available:
            return False
        pool.share(cached)
        new = pool.allocate(num_new)
        assert new is not None, "the pool said there was room"
        sequence.block_ids = cached + new
        sequence.num_computed_tokens = len(cached) * pool.block_size
        sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.num_hashed_blocks = len(cached)
        return True

    def update(
        self, shares: list[ScheduledSequence], token_ids: tuple[int | None, ...]
    ) -> list[Sequence]:
        """Take the step's results, in order. Returns the sequences whose prompt is now read, with
        their next token (or error); they are no longer here and keep their blocks."""
        sampled = iter(token_ids)
        by_key = {sequence.key: sequence for sequence in self.running}
        done: list[Sequence] = []
        for share in shares:
            sequence = by_key.get(share.key)
            wanted = share.sample is not None
            token_id = next(sampled) if wanted else None
            if sequence is None:  # aborted while the step ran
                continue
            sequence.num_computed_tokens += len(share.token_ids)
            sequence.num_steps += 1
            sequence.cache_full_blocks(self._pool)
            if wanted:
                sequence.take(token_id, self._max_model_len)
                done.append(sequence)
        if done:
            finished = set(map(id, done))
            self.running = [sequence for sequence in self.running if id(sequence) not in finished]
        return done

    def abort(self, request_id: str, attempt: int) -> Sequence | None:
        """Remove the sequence and free its blocks. None when it is not here."""
        for queue in (self.waiting, self.running):
            for sequence in queue:
                if sequence.key == (request_id, attempt):
                    queue.remove(sequence)
                    sequence.release(self._pool)
                    return sequence
        return None
