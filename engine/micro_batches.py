"""A step in several parts, so that the stages of a pipeline work at the same time. Pure.

A long prompt's chunk is cut too: its later part follows the earlier one through every stage, so
each stage finds the KV it needs. What is pooled stays whole, since pooled vectors are of a chunk.

Parts win only where a stage's time grows with its tokens. For a few it does not (a stage reads all
of its weights for one token as for many), so a step that only decodes stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.batch import Batch, ScheduledSequence, SequenceResult

MIN_TOKENS = 32
"""Of a part: on two CPU stages 16 tokens in two parts took 1.5 times as long as in one, 64 and more
were faster in two."""


class Share(NamedTuple):
    """Of a sequence of the step: all its tokens or some."""

    owner: int
    """Index of the sequence in the step."""
    sequence: ScheduledSequence


class MicroBatches(NamedTuple):
    parts: tuple[Batch, ...]
    owners: tuple[int, ...]
    """Of all sequences of all parts, one after another: which sequence of the step they are of."""

    def merge(self, results: Iterable[SequenceResult]) -> tuple[SequenceResult, ...]:
        """`results` of all parts in order -> one per sequence of the step, in order."""
        merged: list[SequenceResult] = []
        for owner, result in zip(self.owners, results, strict=True):
            if owner == len(merged):
                merged.append(result)
            else:
                merged[owner] = _joined(merged[owner], result)
        return tuple(merged)


def split(batch: Batch, max_parts: int) -> MicroBatches:
    """With as equal numbers of tokens as can be, and MIN_TOKENS or more in all but the last."""
    num_tokens = batch.num_scheduled_tokens
    num_parts = max(1, min(max_parts, num_tokens // MIN_TOKENS))
    limit = -(-num_tokens // num_parts)
    groups = list(_grouped(batch.sequences, limit))
    parts = tuple(
        Batch(
            sequences=tuple(share.sequence for share in group),
            block_copies=() if index else batch.block_copies,
        )
        for index, group in enumerate(groups)
    )
    return MicroBatches(parts, tuple(share.owner for group in groups for share in group))


def _grouped(sequences: Sequence[ScheduledSequence], limit: int) -> Iterator[list[Share]]:
    """Shares in order, in groups of `limit` tokens but where a whole one is larger."""
    group: list[Share] = []
    room = limit
    for owner, sequence in enumerate(sequences):
        start, end = 0, len(sequence.token_ids)
        while start < end:
            taken = end if sequence.pooling else min(end - start, room)
            group.append(Share(owner, cut(sequence, start, start + taken)))
            start += taken
            room -= taken
            if room <= 0:
                yield group
                group, room = [], limit
    if group:
        yield group


def cut(sequence: ScheduledSequence, start: int, end: int) -> ScheduledSequence:
    """Tokens [start, end) of its share; what is drawn is drawn at its end."""
    is_last = end == len(sequence.token_ids)
    return sequence._replace(
        token_ids=sequence.token_ids[start:end],
        num_computed_tokens=sequence.num_computed_tokens + start,
        samples=sequence.samples if is_last else (),
        next_token_ids=sequence.next_token_ids[start:end],
    )


def _joined(first: SequenceResult, second: SequenceResult) -> SequenceResult:
    return SequenceResult(
        sampled=second.sampled,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        is_finite=first.is_finite and second.is_finite,
        pooled=second.pooled,
    )
