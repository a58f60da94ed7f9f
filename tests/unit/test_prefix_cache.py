"""The prefix cache over a real model: on or off, first or second time, alone or under load, a
request gets the same tokens; and turns of a chat share blocks."""

import random

import pytest

from engine.executor import LocalExecutor
from engine.llm_engine import LLMEngine


@pytest.fixture(scope="module")
def make_engine(tiny_model, make_runner, engine_config):
    runner = make_runner(tiny_model, num_blocks=256)

    def make(caching=True, **sizes):
        config = engine_config(
            num_blocks=256, enable_prefix_caching=caching, max_num_batched_tokens=48, **sizes
        )
        return LLMEngine(config, LocalExecutor(runner))

    return make


def chat(engine, make_request, *, turns=4, talk=0, **sampling):
    """A conversation: each prompt is all that was said before, and a few words more."""
    rng = random.Random(talk)
    said = [rng.randrange(256) for _ in range(21)]
    answers = []
    for turn in range(turns):
        request = make_request(said, request_id=f"{talk}-{turn}", max_tokens=11, **sampling)
        [chunk] = engine.generate([request])
        answers.append(chunk)
        said += [*chunk.token_ids, *(rng.randrange(256) for _ in range(6))]
    return answers


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.4}]
)
def test_on_and_off_give_the_same_chat(make_engine, make_request, sampling):
    on, off = make_engine(caching=True), make_engine(caching=False)
    for talk in range(4):
        with_cache = chat(on, make_request, talk=talk, logprobs=3, **sampling)
        without = chat(off, make_request, talk=talk, logprobs=3, **sampling)
        for a, b in zip(with_cache, without, strict=True):
            assert a.token_ids == b.token_ids
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
    assert off.pool.check().cached == 0
    assert on.pool.check().cached > 0


def test_the_second_time_equals_the_first(make_engine, make_request):
    """A39: a hit changes nothing."""
    engine = make_engine()
    request = make_request(range(60), max_tokens=20)
    [first] = engine.generate([request])
    [second] = engine.generate([request])
    assert second.token_ids == first.token_ids


def test_under_load_equals_alone(make_engine, make_request):
    """A43: what else runs, in which chunks and with which preemptions, changes nothing."""
    rng = random.Random(3)
    requests = [
        make_request(
            [rng.randrange(256) for _ in range(rng.randint(1, 90))],
            request_id=f"{i}",
            max_tokens=16,
            priority=rng.randint(-1, 1),
        )
        for i in range(24)
    ]
    alone = [make_engine(caching=False).generate([request])[0] for request in requests]
    together = make_engine(max_num_seqs=24).generate(requests)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_a_chats_next_turn_computes_only_what_is_new(make_engine, make_request):
    engine = make_engine()
    steps = []
    execute = engine._executor.execute

    def count(batch):
        steps.append(batch.num_scheduled_tokens)
        return execute(batch)

    engine._executor.execute = count
    chat(engine, make_request, turns=1)
    assert sum(steps) == 21 + 10
    steps.clear()
    engine = make_engine()
    engine._executor.execute = count
    chat(engine, make_request, turns=2)
    # The second prompt has 38 tokens; 28 of the 31 that were computed lie in full blocks of 4.
    assert sum(steps) == 31 + (38 - 28) + 10
