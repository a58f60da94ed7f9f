"""A step in parts computes what the whole step computes, every token once and in order."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.request import TokenLogprobs
from core.sampling_params import SamplingParams
from engine.batch import (
    Batch,
    BlockCopy,
    Pooling,
    Sampled,
    SampleSpec,
    ScheduledSequence,
    SequenceResult,
)
from engine.micro_batches import split

BLOCK_SIZE = 4
NOT_FINITE = 13
"""The fake model's token after which nothing of its sequence is a number."""


class FakeModel:
    """Pure but for its KV, which is the token ids: a number of it depends on all tokens before."""

    def __init__(self):
        self.kv = {}

    def execute(self, batch):
        for copy in batch.block_copies:
            self._copy(copy)
        for sequence in batch.sequences:  # all writes first, as in a real forward pass
            for position, token in enumerate(sequence.token_ids, sequence.num_computed_tokens):
                self.kv[self._slot(sequence, position)] = token
        return tuple(map(self._result, batch.sequences))

    def _copy(self, copy):
        for offset in range(BLOCK_SIZE):
            if (copy.source, offset) in self.kv:
                self.kv[copy.target, offset] = self.kv[copy.source, offset]

    def _slot(self, sequence, position):
        return sequence.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE

    def _result(self, sequence):
        start = sequence.num_computed_tokens
        end = start + len(sequence.token_ids)
        context = tuple(self.kv[self._slot(sequence, position)] for position in range(end))
        return SequenceResult(
            sampled=tuple(Sampled(hash((context, spec.position))) for spec in sequence.samples),
            prompt_logprobs=tuple(
                TokenLogprobs(token_id=token, logprob=float(hash(context[: start + 1 + i])))
                for i, token in enumerate(sequence.next_token_ids)
            ),
            is_finite=NOT_FINITE not in context,
            pooled=torch.tensor([float(sum(context[start:]))]) if sequence.pooling else None,
        )


@st.composite
def batches(draw, *, max_tokens=30):
    """Of sequences that have blocks of their own, and what is computed of them before."""
    sequences, before = [], []
    for index in range(draw(st.integers(1, 6))):
        num_computed = draw(st.integers(0, 9))
        num_tokens = draw(st.integers(1, max_tokens))
        ids = st.integers(0, 99)
        tokens = draw(
            st.lists(ids, min_size=num_computed + num_tokens, max_size=num_computed + num_tokens)
        )
        pooling = draw(st.none() | st.none() | st.sampled_from(Pooling))
        wants_logprobs = pooling is None and draw(st.booleans())
        num_next = num_tokens - draw(st.integers(0, 1)) if wants_logprobs else 0
        num_samples = 0 if pooling else draw(st.integers(0, 3))
        sequence = ScheduledSequence(
            request_id=f"{index}",
            token_ids=tuple(tokens[num_computed:]),
            num_computed_tokens=num_computed,
            block_ids=tuple(range(20 * index, 20 * index + 20)),
            samples=tuple(map(spec, range(num_samples))),
            num_prompt_logprobs=2 if wants_logprobs else None,
            next_token_ids=tuple(range(num_next)),
            pooling=pooling,
        )
        sequences.append(sequence)
        if num_computed:
            computed = tuple(tokens[:num_computed])
            before.append(sequence._replace(token_ids=computed, num_computed_tokens=0))
    copies = (BlockCopy(0, 1000), BlockCopy(20, 1001))
    return Batch(sequences=tuple(sequences), block_copies=copies), Batch(sequences=tuple(before))


def spec(position):
    return SampleSpec(sampling=SamplingParams(), choice_index=0, position=position)


def plain(result):
    """With what can be compared."""
    return result._replace(pooled=None if result.pooled is None else result.pooled.tolist())


@given(batches(), st.integers(1, 5))
def test_the_parts_together_give_what_the_whole_gives(step, max_parts):
    batch, before = step
    whole, in_parts = FakeModel(), FakeModel()
    for model in (whole, in_parts):
        model.execute(before)
    steps = split(batch, max_parts)
    results = [result for part in steps.parts for result in in_parts.execute(part)]
    assert [*map(plain, steps.merge(results))] == [*map(plain, whole.execute(batch))]
    assert in_parts.kv == whole.kv


@given(batches(), st.integers(1, 5))
def test_every_token_is_in_one_part_and_in_order(step, max_parts):
    batch, _ = step
    steps = split(batch, max_parts)
    shares = [share for part in steps.parts for share in part.sequences]
    assert list(steps.owners) == sorted(steps.owners)
    assert len(steps.owners) == len(shares)
    for index, sequence in enumerate(batch.sequences):
        mine = [s for s, owner in zip(shares, steps.owners, strict=True) if owner == index]
        assert sum((s.token_ids for s in mine), ()) == sequence.token_ids
        assert sum((s.next_token_ids for s in mine), ()) == sequence.next_token_ids
        assert mine[0].num_computed_tokens == sequence.num_computed_tokens
        for one, following in pairwise(mine):
            assert following.num_computed_tokens == one.num_computed_tokens + len(one.token_ids)
            assert one.samples == ()
        assert mine[-1].samples == sequence.samples
        assert {s.block_ids for s in mine} == {sequence.block_ids}
        assert not (sequence.pooling and len(mine) > 1)


@given(batches(), st.integers(1, 5))
def test_there_are_no_more_parts_than_stages_and_none_is_much_larger_than_its_share(
    step, max_parts
):
    batch, _ = step
    parts = split(batch, max_parts).parts
    assert 1 <= len(parts) <= max_parts
    share = -(-batch.num_scheduled_tokens // len(parts))
    largest_whole = max((len(s.token_ids) for s in batch.sequences if s.pooling), default=0)
    for part in parts:
        assert part.sequences
        assert part.num_scheduled_tokens <= share + largest_whole
    assert [part.block_copies for part in parts] == [batch.block_copies] + [()] * (len(parts) - 1)


def decoding(index):
    return ScheduledSequence(
        request_id=f"{index}",
        token_ids=(index,),
        num_computed_tokens=7,
        block_ids=(2 * index, 2 * index + 1),
        samples=(spec(8),),
    )


@pytest.mark.parametrize(
    ("num_sequences", "max_parts", "sizes"),
    [(1, 3, [1]), (63, 3, [63]), (64, 3, [32, 32]), (100, 3, [34, 34, 32]), (100, 1, [100])],
)
def test_sequences_that_only_decode_are_split_where_they_are_many(num_sequences, max_parts, sizes):
    batch = Batch(sequences=tuple(map(decoding, range(num_sequences))))
    steps = split(batch, max_parts)
    assert [len(part.sequences) for part in steps.parts] == sizes
    assert sum((part.sequences for part in steps.parts), ()) == batch.sequences


def test_one_long_prompt_fills_all_stages():
    prompt = decoding(0)._replace(token_ids=tuple(range(500)), block_ids=tuple(range(200)))
    parts = split(Batch(sequences=(prompt,)), 4).parts
    assert [part.num_scheduled_tokens for part in parts] == [125] * 4
    assert [part.sequences[0].num_computed_tokens for part in parts] == [7, 132, 257, 382]


def test_a_sequence_that_is_no_number_in_its_first_part_is_none_at_all():
    """Even where the later part's own numbers look sound."""
    long = decoding(0)._replace(token_ids=tuple(range(90)), block_ids=tuple(range(30)))
    steps = split(Batch(sequences=(long, decoding(1))), 2)
    assert steps.owners == (0, 0, 1)
    merged = steps.merge([SequenceResult(is_finite=False), SequenceResult(), SequenceResult()])
    assert [result.is_finite for result in merged] == [False, True]
