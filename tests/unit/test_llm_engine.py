"""The colocated engine over the token executor: whatever the pool size, batching, aborts and
cache hits, each request gets exactly its own continuation and every block comes back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ContextLengthError, InternalError, InvalidRequestError
from core.request import FinishReason
from engine.batch import Sampled, SequenceResult


def drain(engine, collected=None):
    tokens = {} if collected is None else collected
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.chunk.token_ids)
        engine.pool.check()
    return tokens


def assert_nothing_held(engine):
    counts = engine.pool.check()
    assert (counts.owned, counts.leased, counts.quarantined) == (0, 0, 0)


def test_one_request(make_token_engine, make_request, expected_tokens):
    engine, executor = make_token_engine()
    [chunk] = engine.generate([make_request(range(1, 41), max_tokens=5)])
    assert chunk.token_ids == expected_tokens(tuple(range(1, 41)), 5)
    assert chunk.finish_reason is FinishReason.LENGTH
    assert executor.batch_sizes == [16, 16, 8, 1, 1, 1, 1], "40 tokens in chunks of at most 16"
    assert_nothing_held(engine)


def test_eos_and_stop_tokens_end_the_request(make_token_engine, make_request, expected_tokens):
    engine, _ = make_token_engine()
    prompt = (7, 8, 9)
    expected = expected_tokens(prompt, 8)
    stop = next(i for i in range(1, 8) if expected[i] not in expected[:i])
    [chunk] = engine.generate([make_request(prompt, stop_token_ids=(expected[stop],))])
    assert chunk.token_ids == expected[: stop + 1]
    assert chunk.finish_reason is FinishReason.STOP


def test_context_length_ends_the_request(make_token_engine, make_request):
    engine, _ = make_token_engine(max_model_len=10)
    [chunk] = engine.generate([make_request(range(6), max_tokens=100)])
    assert len(chunk.token_ids) == 4
    assert chunk.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ((), InvalidRequestError),
        ((50,), InvalidRequestError),
        ((3, -1), InvalidRequestError),
        ((3, 1.5), InvalidRequestError),
        (("a",), InvalidRequestError),
        (range(40), ContextLengthError),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(make_token_engine, make_request, prompt, error):
    engine, _ = make_token_engine(num_blocks=8)
    with pytest.raises(error):
        engine.add_request(make_request(prompt))
    assert not engine.has_unfinished_requests


def test_an_id_that_is_here_already_is_refused(make_token_engine, make_request, expected_tokens):
    engine, _ = make_token_engine()
    request = make_request([1, 2, 3], max_tokens=4)
    engine.add_request(request)
    for _ in range(2):  # waiting, then decoding
        with pytest.raises(InvalidRequestError, match="already here"):
            engine.add_request(replace(request, attempt=1))
        engine.step()
    assert len(drain(engine)["r"]) == 2
    assert engine.generate([request])[0].token_ids == expected_tokens((1, 2, 3), 4)


def test_a_step_that_raises_ends_its_requests_and_no_other(
    make_token_engine, make_request, expected_tokens
):
    engine, executor = make_token_engine(max_num_seqs=1)
    execute = executor.execute

    def broken(batch):
        raise RuntimeError("no device")

    executor.execute = broken
    engine.add_request(make_request([1, 2], request_id="a", num_choices=1))
    engine.add_request(make_request([3, 4], request_id="b", max_tokens=4))
    with pytest.raises(RuntimeError, match="no device"):
        engine.step()
    assert_nothing_held(engine)
    executor.execute = execute
    assert tuple(drain(engine)["b"]) == expected_tokens((3, 4), 4)


def test_generate_leaves_nothing_behind_when_it_raises(make_token_engine, make_request):
    engine, _ = make_token_engine()
    good = make_request([1, 2], request_id="good")
    with pytest.raises(InvalidRequestError):
        engine.generate([good, make_request([99], request_id="bad")])
    assert not engine.has_unfinished_requests
    assert engine.generate([good])[0].token_ids


def test_shared_prefix_is_computed_once(make_token_engine, make_request, expected_tokens):
    engine, executor = make_token_engine()
    prompt = tuple(range(20))
    engine.generate([make_request(prompt, request_id="a")])
    executor.batch_sizes.clear()
    [chunk] = engine.generate([make_request((*prompt, 3), request_id="b", max_tokens=2)])
    assert executor.batch_sizes == [1, 1], "20 of 21 tokens came from the cache"
    assert chunk.token_ids == expected_tokens((*prompt, 3), 2)


def test_generated_tokens_are_cached_for_the_next_turn(make_token_engine, make_request):
    engine, executor = make_token_engine()
    [first] = engine.generate([make_request(range(4), request_id="a", max_tokens=9)])
    executor.batch_sizes.clear()
    engine.generate([make_request((*range(4), *first.token_ids, 1), request_id="b", max_tokens=1)])
    assert executor.batch_sizes == [2], "4 + 8 tokens had full blocks"


def test_salts_never_share(make_token_engine, make_request):
    engine, executor = make_token_engine()
    request = make_request(range(20), request_id="a", max_tokens=1)
    engine.generate([request])
    executor.batch_sizes.clear()
    salted = replace(request, cache_salt="tenant")
    engine.generate([salted])
    assert sum(executor.batch_sizes) == 20


def test_a_sequence_without_a_number_fails_alone(make_token_engine, make_request, expected_tokens):
    engine, executor = make_token_engine()
    execute, batches = executor.execute, []

    def poisoned(batch):
        results = execute(batch)
        batches.append(batch)
        bad = SequenceResult(sampled=(Sampled(None),))
        return tuple(
            bad if len(batches) > 3 and share.request_id == "bad" else result
            for share, result in zip(batch.sequences, results, strict=True)
        )

    executor.execute = poisoned
    engine.add_request(make_request([1, 2], request_id="bad", max_tokens=9))
    engine.add_request(make_request([3, 4], request_id="good", max_tokens=9))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    errors = [output for output in outputs if output.error]
    assert [(o.request_id, type(o.error)) for o in errors] == [("bad", InternalError)]
    good = [t for o in outputs if o.request_id == "good" for t in o.chunk.token_ids]
    assert tuple(good) == expected_tokens((3, 4), 9)
    assert_nothing_held(engine)


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),  # few ids: prefixes collide often
        st.integers(1, 12),
        st.integers(0, 30),  # step before which it is aborted; above ~20 never
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(8, 24),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    caching=st.booleans(),
)
def test_any_mix_gives_each_request_its_own_tokens(
    make_token_engine,
    make_request,
    expected_tokens,
    run_to_the_end,
    requests,
    num_blocks,
    budget,
    max_num_seqs,
    caching,
):
    """8 blocks of 4 hold one maximal request: the others wait, are preempted and come back."""
    engine, _ = make_token_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=max(budget, max_num_seqs + 1),
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
    )
    for i, (prompt, max_tokens, _) in enumerate(requests):
        engine.add_request(make_request(prompt, request_id=str(i), max_tokens=max_tokens))
    tokens = run_to_the_end(engine, {str(i): r[-1] for i, r in enumerate(requests) if r[-1] < 20})
    for i, (prompt, max_tokens, abort_at) in enumerate(requests):
        got = tuple(tokens[str(i), 0])
        assert got == expected_tokens(tuple(prompt), max_tokens)[: len(got)]
        if abort_at >= 20:
            assert len(got) == max_tokens
    assert_nothing_held(engine)
