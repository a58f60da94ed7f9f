"""Reads prompts in chunks under a token budget: fair to short prompts, sure for long ones.

The first in order (priority, then arrival) gets what it needs, except that prompts shorter than
what it still needs may take up to half of the budget: a short prompt waits a step or two behind a
long one, and the long one at most twice its own time. A sequence gets blocks for its whole prompt
when it is admitted, so two half-read prompts can never wait for each other; while the first in
order does not fit, nobody else is admitted.

Prompts read in one step all get their first token at its end. Read one after another, the last gets
it hardly later and the others long before: while several wait, a step is only as large as it must
be to read at full speed, and larger the more answers run, since each step makes them all pay and
the prompts wait for it.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections.abc import Iterable
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from core.config import SchedulerConfig
from engine.batch import ScheduledSequence, SequenceResult
from engine.block_pool import BlockPool
from engine.sequence import Sequence

TOKENS_PER_ANSWER = 16
"""What a running answer adds to the budget of a step while several prompts wait. An answer's token
costs about as much as two of a prompt: so seven eighths of such a step are for prompts."""


class Reserved(NamedTuple):
    """What the decode side of a colocated engine has spoken for: of the step's tokens, of the
    pool's blocks, of the running sequences."""

    num_tokens: int = 0
    num_blocks: int = 0
    num_seqs: int = 0


NOTHING_RESERVED = Reserved()


class PrefillScheduler:
    """Sequences leave it when their next token was sampled, on finish or on abort."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, max_model_len: int) -> None:
        self._config = config
        self._pool = pool
        self._max_model_len = max_model_len
        self.waiting: list[Sequence] = []
        """In order of `Sequence.order`, as is `running`."""
        self.running: list[Sequence] = []

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens still to be computed."""
        sequences: Iterable[Sequence] = (*self.waiting, *self.running)
        return sum(sequence.num_uncomputed_tokens for sequence in sequences)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def has(self, request_id: str) -> bool:
        everyone = (*self.waiting, *self.running)
        return any(sequence.request.request_id == request_id for sequence in everyone)

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """`first` puts a preempted sequence before others of its priority and arrival."""
        insort = insort_left if first else insort_right
        insort(self.waiting, sequence, key=attrgetter("order"))

    def schedule(
        self, now: float, reserved: Reserved = NOTHING_RESERVED
    ) -> list[ScheduledSequence]:
        """Shares of one step."""
        if self.idle:
            return []
        budget = self._budget(reserved)
        heads = [queue[0] for queue in (self.running, self.waiting) if queue]
        first = min(heads, key=attrgetter("order"))
        if self._is_running(first, now, reserved):
            others = self._shortest_but(first)
        elif self.running:
            first, *others = self.running  # nobody may overtake the one that waits for room
        else:
            return []
        return self._share_out(first, others, budget, now, reserved)

    def _budget(self, reserved: Reserved) -> int:
        # One token at least: prompts go on however many answers there are.
        budget = max(self._config.max_num_batched_tokens - reserved.num_tokens, 1)
        enough = self._config.prefill_step_tokens
        if enough is None or len(self.waiting) + len(self.running) == 1:
            return budget
        return min(budget, enough + TOKENS_PER_ANSWER * reserved.num_tokens)

    def _shortest_but(self, first: Sequence) -> list[Sequence]:
        """As many others as could get a token, the shortest first."""
        others = (s for s in (*self.running, *self.waiting) if s is not first)
        return nsmallest(self._config.max_num_seqs, others, key=_shortest_first)

    def _share_out(
        self, first: Sequence, others: list[Sequence], budget: int, now: float, reserved: Reserved
    ) -> list[ScheduledSequence]:
        wanted = first.num_uncomputed_tokens
        shorter = sum(
            sequence.num_uncomputed_tokens
            for sequence in others
            if sequence.num_uncomputed_tokens < wanted and _are_peers(sequence, first)
        )
        num_first = wanted if first.needs_whole else min(wanted, budget - min(shorter, budget // 2))
        budget -= num_first
        shares: list[ScheduledSequence] = []
        for sequence in others:
            if budget <= 0:
                break
            if sequence.needs_whole and sequence.num_uncomputed_tokens > budget:
                continue
            if self._is_running(sequence, now, reserved):
                num_tokens = min(budget, sequence.num_uncomputed_tokens)
                shares.append(sequence.scheduled(num_tokens))
                budget -= num_tokens
        num_first += min(max(budget, 0), wanted - num_first)  # what nobody else could use
        return [first.scheduled(num_first), *shares]

    def _is_running(self, sequence: Sequence, now: float, reserved: Reserved) -> bool:
        """Admit it now if it was not and fits."""
        if sequence.block_ids:
            return True
        cached = self._room_for(sequence, reserved)
        if cached is None:
            return False
        self._take_blocks(sequence, cached)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
        self.waiting.remove(sequence)
        insort_right(self.running, sequence, key=attrgetter("order"))
        return True

    def fits(self, sequence: Sequence, reserved: Reserved = NOTHING_RESERVED) -> bool:
        """Whether a waiting sequence could be admitted now."""
        return self._room_for(sequence, reserved) is not None

    def _room_for(self, sequence: Sequence, reserved: Reserved) -> list[int] | None:
        """The cached blocks that it could be admitted with now, or None."""
        num_seqs = reserved.num_seqs + sum(running.num_choices for running in self.running)
        if num_seqs and num_seqs + sequence.num_choices > self._config.max_num_seqs:
            return None
        cached = self.cached_blocks(sequence)
        num_new = self._pool.num_blocks_for(len(sequence.token_ids)) - len(cached)
        num_taken = num_new + self._pool.num_idle(cached)
        fits = num_taken + reserved.num_blocks <= self._pool.num_available
        return cached if fits else None

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """What it would find in the prefix cache. Its last token is always computed, since its
        logits are what is wanted."""
        pool, num_tokens = self._pool, len(sequence.token_ids)
        num_full = (num_tokens - 1) // pool.block_size if sequence.may_read_cache else 0
        return pool.match_prefix(sequence.hashes(num_full, pool.block_size))

    def _take_blocks(self, sequence: Sequence, cached: list[int]) -> None:
        """Blocks for all known tokens: cached ones shared, others new."""
        pool = self._pool
        pool.share(cached)
        new = pool.allocate(pool.num_blocks_for(len(sequence.token_ids)) - len(cached))
        assert new is not None, "the pool said there was room"
        sequence.block_ids = cached + new
        sequence.num_computed_tokens = len(cached) * pool.block_size
        sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.num_hashed_blocks = len(cached)

    def update(
        self, shares: list[ScheduledSequence], results: tuple[SequenceResult, ...]
    ) -> list[Sequence]:
        """Take the step's results, in order. Returns the sequences whose prompt is now read, with
        their next token (or error) and one per choice; they are no longer here and keep their
        blocks."""
        by_key = {sequence.sequence_key: sequence for sequence in self.running}
        done: list[Sequence] = []
        for share, result in zip(shares, results, strict=True):
            sequence = by_key.get(share.sequence_key)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.computed(len(share.token_ids), result, self._pool)
            if sequence.error is not None or not sequence.num_uncomputed_tokens:
                self.running.remove(sequence)
                done += self._choices(sequence, result)
        return done

    def _choices(self, sequence: Sequence, result: SequenceResult) -> list[Sequence]:
        """The sequence and its forks, each with the token drawn for it (or the error of all)."""
        choices = [sequence]
        for index in range(1, sequence.num_choices):
            choices.append(sequence.fork(sequence.choice_index + index, self._pool))
        sequence.num_choices = 1
        if sequence.pooling is None and sequence.error is None:
            for choice, sampled in zip(choices, result.sampled, strict=True):
                choice.take(sampled, self._max_model_len)
        return choices

    def abort(self, request_id: str, attempt: int) -> list[Sequence]:
        """Remove the request's sequences and free their blocks."""
        key = (request_id, attempt)
        gone = [s for s in (*self.waiting, *self.running) if s.key == key]
        self.waiting = [s for s in self.waiting if s.key != key]
        self.running = [s for s in self.running if s.key != key]
        for sequence in gone:
            sequence.release(self._pool)
        return gone


def _shortest_first(sequence: Sequence) -> tuple[int, int, float]:
    return sequence.request.priority, sequence.num_uncomputed_tokens, sequence.arrived


def _are_peers(sequence: Sequence, other: Sequence) -> bool:
    return sequence.request.priority == other.request.priority
