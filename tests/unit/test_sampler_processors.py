"""What a request may do to its logits: who is touched, by how much, and what stays barred.

The arithmetic over random parameters is compared with a reference in test_sampler; here are the
rules by name."""

import math

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from engine.batch import Sampled, SampleSpec
from engine.sampler import sample
from engine.sampler.filters import filter_tokens
from engine.sampler.processors import is_processed, process

INF = float("inf")


def spec(prompt=(), output=(), barred=(), **sampling):
    return SampleSpec(
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        choice_index=0,
        position=len(prompt) + len(output),
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        barred_token_ids=tuple(barred),
    )


def after(logits, row_spec):
    row = torch.tensor([logits])
    process(row, [row_spec])
    return row[0].tolist()


def barred(row_spec, vocab_size=10):
    return [i for i, x in enumerate(after([0.0] * vocab_size, row_spec)) if x == -INF]


def test_only_what_is_named_changes():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    edited = logits.clone()
    process(
        edited, [spec(), spec(logit_bias=((7, 1.0),), output=[3], presence_penalty=1.0), spec()]
    )
    assert (edited != logits).nonzero().tolist() == [[1, 3], [1, 7]]


@pytest.mark.parametrize(
    ("row_spec", "expected"),
    [
        (spec(), False),
        (spec(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.5), False),
        (spec(logit_bias=((1, 1.0),)), True),
        (spec(allowed_token_ids=(1,)), True),
        (spec(bad_words=((1,),)), True),
        (spec(barred=[1]), True),
        (spec(repetition_penalty=1.1), True),
        (spec(presence_penalty=0.1), True),
        (spec(frequency_penalty=-0.1), True),
    ],
)
def test_is_processed(row_spec, expected):
    assert is_processed(row_spec) is expected


# Bias.


def test_biases_of_one_token_add_up():
    assert after([1.0, 2.0], spec(logit_bias=((0, 1.5), (1, -1.0), (0, 0.25)))) == [2.75, 1.0]


def test_the_largest_bias_forces_a_token_and_the_smallest_bars_it_in_effect():
    logits = torch.tensor([[30.0, -30.0, 29.0]])
    assert sample(logits, [[spec(logit_bias=((1, 100.0),))]]) == [(Sampled(1),)]
    assert sample(logits, [[spec(logit_bias=((0, -100.0),))]]) == [(Sampled(2),)]


# Penalties.


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    row_spec = spec(prompt=[0, 1], repetition_penalty=2.0)
    assert after([4.0, -4.0, 4.0, -4.0], row_spec) == [2.0, -8.0, 4.0, -4.0]
    assert after([4.0, -4.0], spec(prompt=[0, 1], repetition_penalty=0.5)) == [8.0, -2.0]


def test_a19_repetition_counts_prompt_and_output_but_presence_and_frequency_the_output_only():
    """API case A19: "Paris Paris ..." in the prompt weighs on repetition alone."""
    prompt, output = [0, 0, 0, 1], [1, 2, 2, 2]
    logits = [8.0] * 4
    assert after(logits, spec(prompt, output, repetition_penalty=2.0)) == [4.0, 4.0, 4.0, 8.0]
    assert after(logits, spec(prompt, output, presence_penalty=1.5)) == [8.0, 6.5, 6.5, 8.0]
    assert after(logits, spec(prompt, output, frequency_penalty=0.5)) == [8.0, 7.5, 6.5, 8.0]
    assert after(
        logits,
        spec(prompt, output, repetition_penalty=2.0, presence_penalty=1, frequency_penalty=-1),
    ) == [4.0, 4.0, 6.0, 8.0]


def test_bias_comes_before_penalties():
    row_spec = spec([0], logit_bias=((0, -3.0),), repetition_penalty=2.0)
    assert after([1.0], row_spec) == [-4.0]


@pytest.mark.parametrize("cut", range(7))
def test_penalties_after_a_hand_over_are_those_of_an_uninterrupted_run(make_request, cut):
    """Tokens of earlier attempts are output, wherever the request was cut."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 5
    output = [3, 5, 5, 0, 3, 5]
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    request = make_request([3, 1, 1], bad_words=((5, 4), (5, 5, 0)), **penalties)
    resumed = request.with_output(tuple(output[:cut]))
    rest = tuple(output[cut:])
    edited = []
    for row_spec in (
        spec([3, 1, 1], output, bad_words=((5, 4), (5, 5, 0)), **penalties),
        SampleSpec(
            sampling=resumed.sampling,
            choice_index=resumed.choice_index,
            position=len(resumed.token_ids) + len(rest),
            prompt_token_ids=resumed.prompt_token_ids,
            output_token_ids=resumed.output_token_ids + rest,
        ),
    ):
        edited.append(logits.clone())
        process(edited[-1], [row_spec])
    assert torch.equal(*edited)
    assert not torch.equal(edited[0], logits)


# Bars.


def test_allowed_token_ids_bar_all_others():
    assert barred(spec(allowed_token_ids=(2, 7, 7))) == [0, 1, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [9]),
        ([1], [2, 9]),
        ([3, 1], [2, 4, 9]),
        ([3, 1, 5], [9]),
        ([1, 3, 1], [2, 4, 9]),
        ([1, 1], [1, 2, 9]),
    ],
)
def test_bad_words(output, expected):
    """A word's last token is barred where the words before it were just generated."""
    bad_words = ((9,), (1, 2), (3, 1, 4), (1, 1, 1))
    assert barred(spec(output=output, bad_words=bad_words)) == expected


def test_bad_words_do_not_begin_in_the_prompt():
    assert barred(spec(prompt=[3, 1], bad_words=((1, 2), (3, 1, 4)))) == []
    assert barred(spec(prompt=[3], output=[1], bad_words=((1, 2), (3, 1, 4)))) == [2]


def test_barred_token_ids():
    assert barred(spec(barred=[0, 4])) == [0, 4]


def test_a16_an_ending_token_outside_the_vocabulary_bars_nothing_else():
    """API case A16: nor does it write into a neighbour's row."""
    logits = torch.zeros(2, 10)
    process(logits, [spec(barred=[10, 15, 3, 2**40]), spec()])
    assert (logits == -INF).nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize(
    "sampling",
    [
        {"logit_bias": ((1, 100.0),)},
        {"repetition_penalty": 5e-324, "prompt": [0, 1, 2]},
        {"repetition_penalty": 100.0, "output": [0, 1, 2]},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0, "output": [1] * 1_000},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_unbars_a_token(sampling, temperature):
    """Neither one that the request bars nor one that the model never gives."""
    logits = [[0.0, 5.0, -INF, -5.0], [0.0, -INF, -INF, -5.0]]
    row_spec = spec(barred=[1], temperature=temperature, top_k=3, **sampling)
    for row in logits:
        edited = after(row, row_spec)
        assert edited[1:3] == [-INF, -INF]
        assert all(math.isfinite(edited[i]) for i in (0, 3))
    assert all(s.token_id in (0, 3) for (s,) in sample(torch.tensor(logits), [[row_spec]] * 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits_never_leave_the_finite_numbers(temperature):
    """A penalty near 0 or a logit near the end of float32 must not make an infinity or a NaN."""
    row_spec = spec([0, 1], repetition_penalty=5e-324, temperature=temperature)
    assert after([1.0, -1.0, 0.0], row_spec) == [torch.finfo(torch.float32).max, 0.0, 0.0]
    assert sample(torch.tensor([[1.0, -1.0, 0.0]]), [[row_spec]]) == [(Sampled(0),)]
    row_spec = spec([0], repetition_penalty=100.0, temperature=temperature)
    assert after([-3e38], row_spec) == [torch.finfo(torch.float32).min]
    assert sample(torch.tensor([[-3e38]]), [[row_spec]]) == [(Sampled(0),)]


# All barred.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": (3,), "barred": [3]},
        {"allowed_token_ids": (3, 4), "bad_words": ((1, 3), (4,)), "output": [1]},
        {"barred": range(5)},
    ],
)
def test_a17_a_row_with_every_token_barred_says_so_and_fails_alone(temperature, sampling):
    """API case A17: not token 0 because it is the first of equal logits."""
    logits = torch.arange(15.0).reshape(3, 5)
    neighbour = spec(temperature=temperature)
    alone = sample(logits[:1], [[neighbour]])[0]
    rows = [[neighbour], [spec(temperature=temperature, **sampling), neighbour], [neighbour]]
    first, (failed, other), _ = sample(logits, rows)
    assert failed == Sampled(None, all_barred=True)
    assert first == alone
    assert other.token_id is not None


def test_a17_what_leaves_no_allowed_token_is_refused(make_request):
    """API case A17: what is hopeless from the start is the request's fault."""
    for hopeless in (
        {"bad_words": ((4,), (3,), (1, 2))},
        {"bad_words": ((4,),), "stop_token_ids": (3,), "min_tokens": 1},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            make_request([1], allowed_token_ids=(3, 4), **hopeless).check(50)
        assert caught.value.param == "allowed_token_ids"
    make_request([1], allowed_token_ids=(3, 4), bad_words=((4,), (1, 3))).check(50)


# The same words mean the same in transformers.


@pytest.mark.parametrize(
    ("sampling", "theirs"),
    [
        ({"top_k": 7}, hf.TopKLogitsWarper(7)),
        ({"top_p": 0.8}, hf.TopPLogitsWarper(0.8)),
        ({"min_p": 0.05}, hf.MinPLogitsWarper(0.05)),
        ({"typical_p": 0.6}, hf.TypicalLogitsWarper(0.6)),
        ({"typical_p": 0.1}, hf.TypicalLogitsWarper(0.1)),
        (
            {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
            hf.LogitsProcessorList(
                [
                    hf.TopKLogitsWarper(40),
                    hf.TopPLogitsWarper(0.9),
                    hf.MinPLogitsWarper(0.02),
                    hf.TypicalLogitsWarper(0.7),
                ]
            ),
        ),
    ],
)
def test_filters_are_those_of_transformers(sampling, theirs):
    logits = torch.randn(20, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = 2 * (logits - logits.amax(dim=-1, keepdim=True))
    kept = theirs(torch.empty(20, 0, dtype=torch.int64), logits.clone()) > -INF
    for row, expected in zip(logits.numpy(), kept.numpy(), strict=True):
        token_ids, scaled = filter_tokens(row, SamplingParams(**sampling))
        assert token_ids.tolist() == np.flatnonzero(expected).tolist()
        assert scaled.tolist() == row[token_ids].tolist()
    assert 20 < kept.sum() < 10_000


def test_a_mass_reached_exactly_is_reached():
    weights = np.array([1.0, 0.25, 0.25, 0.25, 0.25])
    assert np.exp(np.log(weights)).tolist() == weights.tolist()
    assert filter_tokens(np.log(weights), SamplingParams(top_p=0.5)).token_ids.tolist() == [0]


def test_repetition_penalty_and_bad_words_are_those_of_transformers():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    words = [[3], [7, 4], [2, 7, 9], [5, 6], [7, 2, 7, 8]]
    output = [7, 7, 2, 7]
    expected = hf.LogitsProcessorList(
        [hf.RepetitionPenaltyLogitsProcessor(1.3), hf.NoBadWordsLogitsProcessor(words)]
    )(torch.tensor([output]), logits.clone())
    row_spec = spec(output=output, repetition_penalty=1.3, bad_words=tuple(map(tuple, words)))
    assert after(logits[0].tolist(), row_spec) == pytest.approx(expected[0].tolist())
    assert barred(row_spec) == [3, 4, 8, 9]
