"""GenerateRequest, SamplingParams, KVLayout: what they refuse and what they promise."""

import math
from dataclasses import replace

import pytest

from core.errors import ConfigError, InvalidRequestError
from core.kv import KVLayout
from core.request import FinishReason
from core.sampling_params import SamplingParams


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
    ],
)
def test_bad_sampling_parameter_is_named(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


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
