"""Several answers to one prompt: read once, blocks shared, copied when written to."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InternalError, InvalidRequestError
from core.request import TokenChunk, TokenLogprobs
from engine.executor import LocalExecutor
from engine.llm_engine import LLMEngine, best_of


def test_the_prompt_is_read_once_and_shared(make_token_engine, make_request, expected_tokens):
    engine, executor = make_token_engine()
    prompt = tuple(range(1, 11))  # two full blocks and half of a third
    engine.add_request(make_request(prompt, num_choices=4, max_tokens=8))
    engine.step()
    assert executor.batch_sizes == [10]
    assert engine.kv_usage.num_used_blocks == 3, "four answers over the prompt's own blocks"
    engine.step()
    assert engine.kv_usage.num_used_blocks == 6, "three copies of the half block, one original"
    got = {}
    for _ in range(2):  # the first two tokens of each, seen through the prefix it now writes
        for output in engine.step():
            got.setdefault(output.choice_index, []).extend(output.chunk.token_ids)
    for choice in range(4):
        assert tuple(got[choice]) == expected_tokens(prompt, 4, choice)[2:4]


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=14),
            st.integers(1, 5),
            st.integers(1, 12),
            st.integers(0, 25),  # step before which it is aborted; above ~20 never
        ),
        min_size=1,
        max_size=4,
    ),
    num_blocks=st.integers(8, 20),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    caching=st.booleans(),
)
def test_every_choice_gets_its_own_tokens_whatever_the_memory(
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
    engine, _ = make_token_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
    )
    for i, (prompt, n, max_tokens, _) in enumerate(requests):
        engine.add_request(
            make_request(prompt, request_id=f"{i}", num_choices=n, max_tokens=max_tokens)
        )
    got = run_to_the_end(engine, {f"{i}": r[-1] for i, r in enumerate(requests) if r[-1] <= 20})
    for i, (prompt, n, max_tokens, last_step) in enumerate(requests):
        for choice in range(n):
            tokens = got[f"{i}", choice]
            expected = expected_tokens(tuple(prompt), max_tokens, choice)
            assert tuple(tokens) == expected[: len(tokens)]
            assert len(tokens) == max_tokens or last_step <= 20
    assert engine.pool.check().owned == 0


def test_8_blocks_give_what_ample_memory_gives(
    tiny_model, make_runner, make_request, engine_config
):
    """A real model, sampled with penalties, preempted many times: not a token differs (A41)."""

    def run(num_blocks):
        config = engine_config(num_blocks=num_blocks, block_size=4)
        runner = make_runner(tiny_model, num_blocks=num_blocks)
        engine = LLMEngine(config, LocalExecutor(runner))
        requests = [
            make_request(
                range(3 * i, 3 * i + 7),
                request_id=f"{i}",
                num_choices=2,
                max_tokens=15,
                temperature=0.9,
                seed=i,
                repetition_penalty=1.2,
                frequency_penalty=0.5,
                logprobs=2,
            )
            for i in range(4)
        ]
        chunks = engine.generate(requests)
        assert engine.pool.check().owned == 0
        return engine.kv_usage.num_preemptions, chunks

    preempted, cramped = run(8)
    never, ample = run(100)
    assert preempted > 3
    assert never == 0
    assert [c.token_ids for c in cramped] == [c.token_ids for c in ample]
    assert len({c.token_ids for c in ample}) == 8, "each seed and choice goes its own way"
    for a, b in zip(cramped, ample, strict=True):
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert [t for t, _ in x.top] == [t for t, _ in y.top]


def test_choices_equal_requests_of_their_own(tiny_model, make_runner, make_request, engine_config):
    """A15: choice i is what a request with choice_index i gives alone."""
    engine = LLMEngine(engine_config(), LocalExecutor(make_runner(tiny_model, num_blocks=64)))
    settings = {"temperature": 1.0, "seed": 11, "max_tokens": 10}
    together = engine.generate([make_request(range(9), num_choices=3, **settings)])
    alone = [
        engine.generate([replace(make_request(range(9), **settings), choice_index=i)])[0]
        for i in range(3)
    ]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in together}) == 3


def chunk(*logprobs):
    return TokenChunk(
        token_ids=tuple(range(len(logprobs))),
        logprobs=tuple(TokenLogprobs(token_id=0, logprob=value) for value in logprobs),
    )


def test_every_choice_is_told_of_a_prompt_that_failed(make_token_engine, make_request):
    engine, executor = make_token_engine()
    execute = executor.execute
    executor.execute = lambda batch: tuple(r._replace(is_finite=False) for r in execute(batch))
    engine.add_request(make_request(range(9), num_choices=3, prompt_logprobs=1))
    outputs = engine.step()
    assert [output.choice_index for output in outputs] == [0, 1, 2]
    assert all(isinstance(output.error, InternalError) for output in outputs)
    assert not engine.has_unfinished_requests
    counts = engine.pool.check()
    assert counts.owned == counts.cached == 0


def test_best_of_compares_means():
    short, long, bad = chunk(-1.0), chunk(-0.5, -1.0, -0.6), chunk(-3.0, -0.1)
    assert best_of([bad, short, long], 2) == [long, short]


@pytest.mark.parametrize("n", [0, 129])
def test_bad_numbers_of_choices_are_refused(make_token_engine, make_request, n):
    engine, _ = make_token_engine()
    with pytest.raises(InvalidRequestError, match="n must be between"):
        engine.add_request(make_request([1], num_choices=n))
