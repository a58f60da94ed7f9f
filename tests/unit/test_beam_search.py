"""Beam search against Hugging Face's on a tiny model, with ample memory and with almost none."""

from dataclasses import replace

import pytest
import torch

from core.errors import InternalError, InvalidRequestError
from core.request import FinishReason
from engine.batch import Sampled, SequenceResult
from engine.beam_search import BeamSearchParams, Continuation, Hypotheses
from engine.executor import LocalExecutor
from engine.llm_engine import LLMEngine

PROMPTS = [[5], [3, 14, 15, 92, 65, 35, 89], list(range(40, 63))]


@pytest.fixture(scope="module")
def model(make_hf_model, tmp_path_factory):
    model = make_hf_model("llama2", seed=3)
    folder = tmp_path_factory.mktemp("beams")
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.fixture(scope="module")
def make_engine(model, make_runner, engine_config):
    def make(**sizes):
        config = engine_config(**sizes)
        runner = make_runner(model[1], num_blocks=config.cache.num_blocks, block_size=4)
        return LLMEngine(config, LocalExecutor(runner))

    return make


@torch.no_grad()
def reference(model, prompt, width, n, max_tokens, eos, **settings):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    answers = []
    for row in out.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token_id in enumerate(row) if token_id in eos]
        answers.append(tuple(row[: ends[0] + 1] if ends else row))
    return answers, out.sequences_scores.tolist()


# Ends that the model likes at some point, so that beams of unequal length compete.
EOS = list(range(3, 101, 12))
SETTINGS = [
    {},
    {"early_stopping": True},
    {"early_stopping": "never", "length_penalty": 0.3},
    {"length_penalty": 0.0},
    {"length_penalty": -1.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("width", [2, 4])
def test_equals_hugging_face(model, make_engine, make_request, settings, width):
    hf, _ = model
    engine = make_engine(num_blocks=64)
    lengths = set()
    for prompt in PROMPTS:
        expected, scores = reference(hf, prompt, width, width, 14, EOS, **settings)
        request = make_request(prompt, max_tokens=14, num_choices=width, stop_token_ids=tuple(EOS))
        chunks = engine.beam_search(request, BeamSearchParams(beam_width=width, **settings))
        assert [chunk.token_ids for chunk in chunks] == expected
        assert [chunk.score for chunk in chunks] == pytest.approx(scores, abs=1e-4)
        for chunk in chunks:
            ended = chunk.token_ids[-1] in EOS
            assert chunk.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        lengths |= {len(answer) for answer in expected}
        counts = engine.pool.check()
        assert counts.owned == 0
    assert len(lengths) > 1, "answers of one length prove little of the ends"


@pytest.mark.parametrize("num_blocks", [8, 9, 12])
@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_too_small_for_all_beams_changes_nothing(
    make_engine, make_request, num_blocks, caching
):
    """Two searches, sampled neighbours, and room for one or two beams at a time."""
    params = BeamSearchParams(beam_width=3)
    ample = make_engine(num_blocks=200)
    requests = [
        make_request(prompt, request_id=f"b{i}", max_tokens=9, num_choices=3)
        for i, prompt in enumerate(PROMPTS[1:])
    ]
    plain = [make_request([9, i], request_id=f"p{i}", max_tokens=20) for i in range(2)]
    expected = [ample.beam_search(request, params) for request in requests]
    expected_plain = ample.generate(plain)
    engine = make_engine(num_blocks=num_blocks, enable_prefix_caching=caching)
    for request in requests:
        engine.add_beam_search(request, params)
    for request in plain:
        engine.add_request(request)
    got = {}
    for _ in range(3000):
        for output in engine.step():
            assert output.error is None
            key = (output.request_id, output.choice_index)
            got[key] = got.get(key, ()) + output.chunk.token_ids
        engine.pool.check()
        if not engine.has_unfinished_requests:
            break
    assert not engine.has_unfinished_requests, "it must come to an end"
    for request, chunks in zip(requests, expected, strict=True):
        for index, chunk in enumerate(chunks):
            assert got[request.request_id, index] == chunk.token_ids
    for request, chunk in zip(plain, expected_plain, strict=True):
        assert got[request.request_id, 0] == chunk.token_ids
    assert engine.pool.check().owned == 0


def test_beams_share_their_prompt(make_engine, make_request):
    engine = make_engine(num_blocks=64)
    request = make_request(range(40), max_tokens=3, num_choices=4)
    engine.add_beam_search(request, BeamSearchParams(beam_width=4))
    most = 0
    while engine.has_unfinished_requests:
        engine.step()
        most = max(most, engine.kv_usage.num_used_blocks)
    assert most <= 10 + 2 * 4, "10 blocks of prompt once, and at most two more for each beam"


def test_abort_gives_everything_back(make_engine, make_request):
    engine = make_engine(num_blocks=16)
    engine.add_beam_search(make_request(range(9), num_choices=2), BeamSearchParams(beam_width=3))
    for _ in range(4):
        engine.step()
    assert engine.pool.check().owned > 0
    assert engine.abort("r")
    assert engine.pool.check().owned == 0
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("width", "n", "param"), [(0, 1, "beam_width"), (129, 1, "beam_width"), (2, 3, "n")]
)
def test_bad_parameters_are_refused(make_engine, make_request, width, n, param):
    engine = make_engine(num_blocks=8)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_beam_search(make_request([1], num_choices=n), BeamSearchParams(beam_width=width))
    assert caught.value.param == param
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_beam_that_fails_ends_the_search_and_leaves_nothing(make_engine, make_request, failing):
    """Its siblings of the same step are neither parked nor in a scheduler."""
    engine = make_engine(num_blocks=32)
    request = replace(make_request(range(9), num_choices=2), choice_index=4)
    engine.add_beam_search(request, BeamSearchParams(beam_width=3))
    engine.step()
    execute = engine._executor.execute

    def poisoned(batch):
        results = list(execute(batch))
        results[failing] = SequenceResult(sampled=(Sampled(None),))
        return tuple(results)

    engine._executor.execute = poisoned
    [output] = engine.step()
    assert isinstance(output.error, InternalError)
    assert output.choice_index == 4
    assert engine.pool.check().owned == 0
    assert not engine.has_unfinished_requests


def test_choices_are_numbered_from_the_requests_own(make_engine, make_request):
    request = replace(make_request(range(9), num_choices=2, max_tokens=3), choice_index=4)
    chunks = make_engine(num_blocks=32).beam_search(request, BeamSearchParams(beam_width=2))
    assert [len(chunk.token_ids) for chunk in chunks] == [3, 3]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("length_penalty", 1e4),
        ("length_penalty", float("nan")),
        ("early_stopping", "soon"),
        ("beam_width", 2.5),
    ],
)
def test_impossible_settings_are_refused(param, value):
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, param: value})
    assert caught.value.param == param


def test_more_beams_than_tokens_are_refused(make_engine, make_request):
    with pytest.raises(InvalidRequestError, match="only 101 tokens"):
        make_engine(num_blocks=8).beam_search(make_request([1]), BeamSearchParams(beam_width=102))


@pytest.mark.parametrize(
    "sampling", [{"logprobs": 1}, {"min_tokens": 2}, {"logit_bias": ((1, 2.0),)}, {"top_p": 0.5}]
)
def test_what_a_search_would_ignore_is_refused(make_engine, make_request, sampling):
    engine = make_engine(num_blocks=32)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_beam_search(make_request([1], **sampling), BeamSearchParams(beam_width=2))
    assert caught.value.param == next(iter(sampling))
    assert not engine.has_unfinished_requests


def test_only_ends_among_the_best_count():
    """An end that is not among the best beam_width candidates is no answer."""
    search = Hypotheses(BeamSearchParams(beam_width=1), eos_token_ids=(0,), max_tokens=9)
    live = search.advance([()], [Continuation(0, 0, -5.0), Continuation(0, 4, -1.0)])
    assert live == [Continuation(0, 4, -1.0)]
    assert search.answers == []
