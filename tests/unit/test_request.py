"""GenerateRequest, SamplingParams, KVLayout: what they refuse and what they promise."""

import math
from dataclasses import replace

import pytest

from core.errors import ConfigError, InvalidRequestError
from core.kv import KVLayout
from core.request import FinishReason
from core.sampling_params import MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.inf),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("max_tokens", 2**31),
        ("stop_token_ids", (2**31,)),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(129))),
        ("typical_p", 0.0),
        ("typical_p", 1.1),
        ("typical_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((2**31, 0.0),)),
        ("logit_bias", ((1, 100.1),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, -math.inf),)),
        ("logit_bias", ((1, 0.0),) * 1025),
        ("bad_words", ((),)),
        ("bad_words", ((1, -1),)),
        ("bad_words", ((1,) * 65,)),
        ("bad_words", ((1,),) * 129),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", (1,) * 65_537),
        ("min_tokens", -1),
        ("min_tokens", 17),  # the default of max_tokens is 16
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
    ],
)
def test_bad_sampling_parameter_is_named(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0, "typical_p": 1.0},
        {"temperature": 5e-324, "top_p": 5e-324, "typical_p": 5e-324, "repetition_penalty": 5e-324},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 100.0},
        {"logit_bias": ((0, -100.0), (0, 100.0)), "bad_words": ((1,) * 64,) * 128},
        {"min_tokens": 16, "logprobs": 0, "prompt_logprobs": 20, "seed": -MAX_SEED},
    ],
)
def test_limits_themselves_are_allowed(sampling):
    SamplingParams(**sampling)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False),
        ({"logit_bias": ((1, 1.0),), "allowed_token_ids": (1,), "min_tokens": 3}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"bad_words": ((1, 2),)}, True),
    ],
)
def test_reads_tokens(sampling, expected):
    assert SamplingParams(**sampling).reads_tokens is expected


def test_with_output_continues_the_same_request(make_request):
    request = make_request([1, 2], max_tokens=5)
    again = request.with_output((7, 8))
    assert (again.attempt, again.token_ids, again.num_remaining_tokens) == (1, (1, 2, 7, 8), 3)
    assert again.with_output((7, 8, 9)).token_ids == (1, 2, 7, 8, 9)
    assert request.attempt == 0


def test_stop_reason(make_request):
    request = make_request([1], max_tokens=3, stop_token_ids=(9,))
    assert request.stop_reason(9, 1) is FinishReason.STOP
    assert request.stop_reason(5, 2) is None
    assert request.stop_reason(5, 3) is FinishReason.LENGTH
    assert request.stop_reason(9, 3) is FinishReason.STOP, "a stop at the limit is a stop"


def test_ignore_eos_ignores_eos_only(make_request):
    request = replace(make_request([1], stop_token_ids=(9,), ignore_eos=True), eos_token_ids=(2,))
    assert request.stop_reason(2, 1) is None
    assert request.stop_reason(9, 1) is FinishReason.STOP
    listening = replace(request, sampling=SamplingParams(max_tokens=8))
    assert listening.stop_reason(2, 1) is FinishReason.STOP


def test_nothing_that_ends_the_output_does_so_before_min_tokens(make_request):
    request = make_request([1], max_tokens=4, stop_token_ids=(9,), min_tokens=2)
    request = replace(request, eos_token_ids=(2, 3))
    assert sorted(request.ending_token_ids) == [2, 3, 9]
    for token_id in (2, 3, 9):
        reasons = [request.stop_reason(token_id, count) for count in (1, 2, 3)]
        assert reasons == [None, None, FinishReason.STOP]
    assert request.stop_reason(9, 4) is FinishReason.STOP
    shorter = make_request([1], max_tokens=2, stop_token_ids=(9,), min_tokens=2)
    assert shorter.stop_reason(9, 2) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", (5, 151_645)),
        ("logit_bias", ((5, 1.0), (191_222, -100.0))),
        ("allowed_token_ids", (5, 10)),
        ("bad_words", ((5,), (2, 10, 3))),
    ],
)
def test_a16_token_ids_outside_the_vocabulary_are_refused_by_name(make_request, field, value):
    """API case A16: they would crash the step, or write into a neighbour's row."""
    with pytest.raises(InvalidRequestError, match=f"{field}.* 10$") as caught:
        make_request([1], min_tokens=2, **{field: value}).check(vocab_size=10)
    assert caught.value.param == field


@pytest.mark.parametrize("num_choices", [0, 129])
def test_impossible_numbers_of_choices_are_refused(make_request, num_choices):
    with pytest.raises(InvalidRequestError) as caught:
        replace(make_request([1]), num_choices=num_choices).check(vocab_size=2)
    assert caught.value.param == "n"


def test_check(make_request):
    make_request([1]).check(vocab_size=2)
    for bad, param in (
        (make_request([]), "prompt"),
        (make_request([2]), "prompt"),
        (make_request([1], output=[2]), "prompt"),
        (make_request([1], output=[1] * 8, max_tokens=8), "max_tokens"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            bad.check(vocab_size=2)
        assert caught.value.param == param


def layout(**changes):
    shape = {
        "model": "m",
        "dtype": "float32",
        "block_size": 16,
        "first_layer": 0,
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_dim": 64,
    }
    return KVLayout(**{**shape, **changes})


def test_layout_bytes_and_difference():
    assert layout().bytes_per_block == 2 * 30 * 3 * 16 * 64 * 4
    assert layout(dtype="bfloat16").bytes_per_block == layout().bytes_per_block // 2
    assert layout().difference(layout()) is None
    for change in ({"model": "n"}, {"dtype": "bfloat16"}, {"block_size": 32}, {"inner_order": "x"}):
        reason = layout().difference(layout(**change))
        assert reason is not None
        assert next(iter(change)) in reason


def test_impossible_configs_are_refused(engine_config):
    for sizes in ({"num_blocks": 1}, {"block_size": 0}, {"max_num_seqs": 0}):
        with pytest.raises(ConfigError):
            engine_config(**sizes)
