"""Every step and every result survives the way between ranks, bit for bit."""

import math
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError, InternalError, ModelLoadError, RankLostError
from core.kv import KVLayout
from core.request import TokenLogprobs
from core.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from engine.batch import (
    Batch,
    BlockCopy,
    Pooling,
    Sampled,
    SampleSpec,
    ScheduledSequence,
    SequenceResult,
)
from engine.step_plan import (
    Begin,
    ClearBlocks,
    Ready,
    Stop,
    plan_from_bytes,
    plan_to_bytes,
    ready_from_bytes,
    ready_to_bytes,
    results_from_bytes,
    results_to_bytes,
)

COUNTS = st.integers(0, 2**31 - 1)
TOKENS = st.lists(COUNTS, max_size=6).map(tuple)
MAYBE_TOP = st.none() | st.integers(0, MAX_LOGPROBS)
"""Absent and 0 are different things."""
FLOAT32 = st.floats(width=32)

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=COUNTS,
    top_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    logit_bias=st.lists(st.tuples(COUNTS, st.floats(-100, 100)), max_size=4).map(tuple),
    bad_words=st.lists(TOKENS.filter(len), max_size=3).map(tuple),
    seed=st.integers(-MAX_SEED, MAX_SEED),
    logprobs=MAYBE_TOP,
)
SPECS = st.builds(
    SampleSpec,
    sampling=SAMPLING,
    choice_index=COUNTS,
    position=COUNTS,
    num_logprobs=MAYBE_TOP,
    prompt_token_ids=TOKENS,
    output_token_ids=TOKENS,
    barred_token_ids=TOKENS,
)
SEQUENCES = st.builds(
    ScheduledSequence,
    request_id=st.text(max_size=5),
    token_ids=TOKENS,
    num_computed_tokens=COUNTS,
    block_ids=TOKENS,
    samples=st.lists(SPECS, max_size=3).map(tuple),
    num_prompt_logprobs=MAYBE_TOP,
    next_token_ids=TOKENS,
    pooling=st.none() | st.sampled_from(Pooling),
    attempt=COUNTS,
    choice_index=COUNTS,
)
BATCHES = st.builds(
    Batch,
    sequences=st.lists(SEQUENCES, max_size=4).map(tuple),
    block_copies=st.lists(st.builds(BlockCopy, COUNTS, COUNTS), max_size=4).map(tuple),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=COUNTS,
    logprob=FLOAT32,
    top=st.lists(st.tuples(COUNTS, FLOAT32), max_size=3).map(tuple),
)
RESULTS = st.lists(
    st.builds(
        SequenceResult,
        sampled=st.lists(
            st.builds(
                Sampled,
                token_id=st.none() | COUNTS,
                logprobs=st.none() | LOGPROBS,
                all_barred=st.booleans(),
            ),
            max_size=3,
        ).map(tuple),
        prompt_logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
        is_finite=st.booleans(),
        pooled=st.none() | st.lists(FLOAT32, min_size=1, max_size=8).map(torch.tensor),
    ),
    max_size=4,
).map(tuple)


def nameless(batch):
    """What a rank needs to know: the sequences by their place."""
    named = enumerate(batch.sequences)
    return Batch(
        sequences=tuple(s._replace(request_id=f"{i}", attempt=0, choice_index=0) for i, s in named),
        block_copies=batch.block_copies,
    )


def bits(value):
    """To compare NaN with NaN, and 0.0 not with -0.0."""
    match value:
        case float():
            return struct.pack("<f", value)
        case torch.Tensor():
            return value.dtype, tuple(value.shape), value.numpy().tobytes()
        case TokenLogprobs():
            return value.token_id, bits(value.logprob), bits(value.top)
        case tuple():
            return type(value), *map(bits, value)
        case _:
            return value


@given(BATCHES)
def test_a_step_arrives_as_it_was(batch):
    assert plan_from_bytes(plan_to_bytes(batch)) == nameless(batch)


@given(BATCHES)
def test_who_samples_nothing_learns_how_many_are_sampled_and_no_more(batch):
    stripped = plan_from_bytes(plan_to_bytes(batch, with_sampling=False))
    nothing = SampleSpec(sampling=SamplingParams(), choice_index=0, position=0)
    expected = tuple(
        sequence._replace(samples=(nothing,) * len(sequence.samples))
        for sequence in nameless(batch).sequences
    )
    assert stripped == Batch(sequences=expected, block_copies=batch.block_copies)


@given(st.lists(COUNTS, max_size=9).map(tuple))
def test_the_other_plans(block_ids):
    assert plan_from_bytes(plan_to_bytes(ClearBlocks(block_ids))) == ClearBlocks(block_ids)
    assert plan_from_bytes(plan_to_bytes(Stop())) == Stop()


@given(RESULTS)
def test_results_arrive_bit_for_bit(results):
    assert bits(results_from_bytes(results_to_bytes(results))) == bits(results)


def test_numbers_at_the_edge_of_float32():
    edges = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 3.4e38, 1 / 3])
    top = tuple(enumerate(edges.tolist()))
    logprobs = TokenLogprobs(token_id=1, logprob=edges[-1].item(), top=top)
    results = (SequenceResult(sampled=(Sampled(7, logprobs),), pooled=edges),)
    assert bits(results_from_bytes(results_to_bytes(results))) == bits(results)


def test_a_pooled_vector_may_be_a_view_in_another_dtype_and_is_writable_at_the_other_end():
    rows = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    [result] = results_from_bytes(results_to_bytes([SequenceResult(pooled=rows[:, 1].float())]))
    assert result.pooled.add_(1).tolist() == [2.0, 6.0, 10.0]


@given(st.integers(0, 2**31 - 1), st.text(max_size=9))
def test_readiness(num_blocks, model):
    layout = KVLayout(
        model=model,
        dtype="float32",
        block_size=16,
        first_layer=3,
        num_layers=2,
        first_kv_head=1,
        num_kv_heads=2,
        head_dim=64,
        inner_order="tiles16",
    )
    ready = Ready(layout, num_blocks, "127.0.0.1:7")
    assert ready_from_bytes(ready_to_bytes(ready)) == ready
    begin = Begin((layout, replace(layout, first_layer=9)), "secret")
    assert plan_from_bytes(plan_to_bytes(begin)) == begin


@pytest.mark.parametrize("kind", [ConfigError, ModelLoadError, InternalError, RankLostError])
def test_what_kept_a_rank_from_being_ready_is_raised_at_the_other_end(kind):
    with pytest.raises(kind, match="7 heads over 2") as caught:
        ready_from_bytes(ready_to_bytes(kind("7 heads over 2")))
    assert type(caught.value) is kind


def test_a_decode_step_of_many_long_sequences_is_a_few_kilobytes():
    """32 sequences of 2,048 tokens: 128 blocks each, out of some thousands."""
    greedy = SampleSpec(sampling=SamplingParams(temperature=0.0), choice_index=0, position=2048)
    sequences = tuple(
        ScheduledSequence(
            request_id="a request's own name",
            token_ids=(50_000,),
            num_computed_tokens=2047,
            block_ids=tuple(range(128 * i, 128 * (i + 1))),
            samples=(greedy,),
        )
        for i in range(32)
    )
    batch = Batch(sequences=sequences)
    small, whole = (len(plan_to_bytes(batch, with_sampling=sampling)) for sampling in (False, True))
    assert 8_000 < small < whole < 12_000
