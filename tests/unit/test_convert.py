"""Every core value survives the wire unchanged; impossible messages become named errors."""

from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import errors
from core.kv import BlockRef, ChannelOffer, KVHandle, KVLayout, PullRequest
from core.lifetime import DecodeTimes, PrefillTimes
from core.prefix import BlockHash
from core.request import FinishReason, GenerateRequest, SequenceOutput, TokenLogprobs
from core.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from core.worker import WorkerId, WorkerInfo, WorkerReport, WorkerRole
from protocol import convert
from protocol import worker_pb2 as pb

NAMES = st.text(max_size=12)
COUNTS = st.integers(0, 2**31 - 1)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
SECONDS = st.floats(0, 1e6)
WORDS = st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)
LOGPROB = st.floats(max_value=0, allow_nan=False, width=32)
HASHES = st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), max_size=4).map(tuple)
REFS = st.lists(
    st.builds(BlockRef, block_id=st.integers(0, 2**32 - 1), generation=st.integers(0, 2**63)),
    max_size=4,
).map(tuple)

MAYBE_TOP = st.none() | st.integers(0, MAX_LOGPROBS)
"""Absent and 0 are different things."""

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=COUNTS,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(COUNTS, st.floats(-100, 100)), max_size=4).map(tuple),
    bad_words=st.lists(WORDS, max_size=4).map(tuple),
    allowed_token_ids=st.lists(st.integers(100, 2**31 - 1), max_size=6).map(tuple),
    seed=st.integers(-MAX_SEED, MAX_SEED),
    max_tokens=st.integers(1000, 2**31 - 1),
    min_tokens=st.integers(0, 1000),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    logprobs=MAYBE_TOP,
    prompt_logprobs=MAYBE_TOP,
)
REQUESTS = st.builds(
    GenerateRequest,
    request_id=NAMES,
    model=NAMES,
    prompt_token_ids=TOKENS,
    sampling=SAMPLING,
    eos_token_ids=TOKENS,
    output_token_ids=TOKENS,
    attempt=COUNTS,
    choice_index=COUNTS,
    cache_salt=NAMES,
    priority=st.integers(-(2**31), 2**31 - 1),
)
LAYOUTS = st.builds(
    KVLayout,
    model=NAMES,
    dtype=NAMES,
    block_size=COUNTS,
    first_layer=COUNTS,
    num_layers=COUNTS,
    first_kv_head=COUNTS,
    num_kv_heads=COUNTS,
    head_dim=COUNTS,
    inner_order=NAMES,
)
HANDLES = st.builds(
    KVHandle,
    handle_id=NAMES,
    request_id=NAMES,
    attempt=COUNTS,
    worker=NAMES,
    incarnation=NAMES,
    address=NAMES,
    layouts=st.lists(LAYOUTS, min_size=1, max_size=3).map(tuple),
    blocks=REFS,
    block_hashes=HASHES,
    num_tokens=COUNTS,
    lease_s=SECONDS,
)
OFFERS = st.builds(
    ChannelOffer,
    channel_id=NAMES,
    source=COUNTS,
    backend=NAMES,
    store_host=NAMES,
    store_port=COUNTS,
    layout=LAYOUTS,
    incarnation=NAMES,
    max_message_bytes=st.integers(1, 2**62),
)
PULLS = st.builds(
    PullRequest,
    handle_id=NAMES,
    request_id=NAMES,
    attempt=COUNTS,
    incarnation=NAMES,
    channel_id=NAMES,
    transfer_id=st.integers(0, 2**62),
    first_position=COUNTS,
    blocks=REFS,
    block_hashes=HASHES,
)
INFOS = st.builds(
    WorkerInfo,
    worker_id=st.builds(WorkerId, name=NAMES, incarnation=NAMES),
    role=st.sampled_from(WorkerRole),
    address=NAMES,
    model=NAMES,
    layout=LAYOUTS,
    num_blocks=COUNTS,
    max_model_len=COUNTS,
    max_num_seqs=COUNTS,
    vocab_size=COUNTS,
    num_threads=COUNTS,
    device=NAMES,
    pid=COUNTS,
)
REPORTS = st.builds(
    WorkerReport,
    sequence_number=st.integers(0, 2**62),
    num_waiting=COUNTS,
    num_running=COUNTS,
    num_queued_tokens=COUNTS,
    num_free_blocks=COUNTS,
    num_leased_blocks=COUNTS,
    num_cached_blocks=COUNTS,
    num_blocks=COUNTS,
    stored=HASHES,
    evicted=HASHES,
    rss_bytes=st.integers(0, 2**62),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=COUNTS,
    logprob=LOGPROB,
    top=st.lists(st.tuples(COUNTS, LOGPROB), max_size=3).map(tuple),
)
OUTPUTS = st.builds(
    SequenceOutput,
    request_id=NAMES,
    attempt=COUNTS,
    token_ids=TOKENS,
    logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    prompt_logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    handle=st.none() | HANDLES,
    prefill_times=st.none()
    | st.builds(
        PrefillTimes,
        queue_s=SECONDS,
        prefill_s=SECONDS,
        num_prompt_tokens=COUNTS,
        num_cached_tokens=COUNTS,
        num_steps=COUNTS,
    ),
    decode_times=st.none()
    | st.builds(
        DecodeTimes,
        queue_s=SECONDS,
        transfer_s=SECONDS,
        decode_s=SECONDS,
        num_cached_blocks=COUNTS,
        num_pulled_blocks=COUNTS,
        num_pulled_bytes=st.integers(0, 2**62),
        num_steps=COUNTS,
    ),
)
ROUND_TRIPS = {
    "sampling": (SAMPLING, pb.SamplingParams),
    "request": (REQUESTS, pb.GenerateRequest),
    "layout": (LAYOUTS, pb.KVLayout),
    "handle": (HANDLES, pb.KVHandle),
    "offer": (OFFERS, pb.ChannelOffer),
    "pull": (PULLS, pb.PullRequest),
    "info": (INFOS, pb.WorkerInfo),
    "logprobs": (LOGPROBS, pb.TokenLogprobs),
    "report": (REPORTS, pb.WorkerReport),
    "output": (OUTPUTS, pb.SequenceOutput),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip(name):
    values, message = ROUND_TRIPS[name]

    @settings(max_examples=40, deadline=None)
    @given(value=values)
    def survives(value):
        wire = getattr(convert, f"{name}_to_proto")(value).SerializeToString()
        assert getattr(convert, f"{name}_from_proto")(message.FromString(wire)) == value

    survives()


def error_classes():
    """Those that cross the wire; the router has a few of its own that never do."""
    return [
        cls
        for cls in errors._tree(errors.TwostrokeError)
        if cls.__module__ == "core.errors" and cls is not errors.TwostrokeError
    ]


@pytest.mark.parametrize("cls", error_classes())
def test_every_error_keeps_its_class_message_and_param(cls):
    error = convert.error_from_proto(convert.error_to_proto(cls("what happened", param="field")))
    assert type(error) is cls
    assert (error.message, error.param) == ("what happened", "field")


def test_error_codes_are_unique():
    codes = [cls.code for cls in error_classes()]
    assert len(set(codes)) == len(codes)


def test_unknown_error_code_is_an_internal_error():
    assert type(errors.error_from_code("from_the_future", "m")) is errors.InternalError


@pytest.mark.parametrize(
    "message",
    [
        pb.KVHandle(block_ids=[1, 2], block_generations=[1]),
        pb.WorkerInfo(role="spectator"),
        pb.GenerateRequest(sampling=pb.SamplingParams(temperature=-1, top_p=1, max_tokens=1)),
        pb.GenerateRequest(),
        pb.SequenceOutput(finish_reason="tired"),
        pb.SequenceOutput(logprobs=[pb.TokenLogprobs(top_token_ids=[1], top_logprobs=[-1, -2])]),
    ],
)
def test_impossible_messages_are_refused(message):
    name = {
        pb.KVHandle: "handle",
        pb.WorkerInfo: "info",
        pb.GenerateRequest: "request",
        pb.SequenceOutput: "output",
    }[type(message)]
    with pytest.raises(errors.InvalidRequestError):
        getattr(convert, f"{name}_from_proto")(message)


def test_a_request_for_several_choices_does_not_cross_the_wire():
    """A worker takes one choice per request; silently one answer would come back."""
    sampling = SamplingParams(max_tokens=1)
    request = GenerateRequest(
        request_id="r", model="m", prompt_token_ids=(1,), sampling=sampling, num_choices=2
    )
    with pytest.raises(errors.InvalidRequestError) as caught:
        convert.request_to_proto(request)
    assert caught.value.param == "n"


ELSEWHERE = {"error", "num_choices"}
"""Fields with tests of their own."""


def test_every_field_of_every_core_value_is_exercised():
    """A field forgotten in convert would take its default and slip through the tests above."""
    for values, _ in ROUND_TRIPS.values():
        strategy = values.wrapped_strategy
        missing = set(get_type_hints(strategy.target)) - set(strategy.kwargs) - ELSEWHERE
        assert not missing, f"{strategy.target.__name__}: the round trip does not vary {missing}"
