"""Colocated workers behind the router, each in a process of its own and all in this one.

What a client gets must not tell the kinds of clusters apart: the same bytes as the disaggregated
cluster, the same tokens as the engine alone, whatever is aborted, preempted, killed or stopped.
"""

import asyncio
import json
import random

import pytest

from core.config import CacheConfig, EngineConfig
from core.errors import ConfigError
from core.worker import WorkerRole
from engine.llm_engine import LLMEngine
from router.server import WorkerEndpoint

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(256) for _ in range(length)] for length in (1, 15, 16, 17, 90, 300)]
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
SEVERAL = {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": 2, "presence_penalty": 0.5}


@pytest.fixture(params=["processes", "in process"])
def colocated_of(request, cluster_of, local_cluster_of):
    if request.param == "in process":
        return local_cluster_of
    return lambda model, num_colocated=1, **settings: cluster_of(
        model, num_colocated=num_colocated, **settings
    )


async def stream(cluster, prompt, max_tokens, *, on_token=lambda count: None, **fields):
    """Every event of a streamed completion but for its id and time, and all text."""
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, **fields}
    events = []
    async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return [event]
                events += event["choices"]
                on_token(len(events))
    return events


def tokens_of(events):
    return [token for event in events for token in event["token_ids"]]


def by_choice(events):
    """Choices of one reply run apart in time: what each says, in order. Log probabilities as far as
    the order of sums in another batch leaves them."""
    rounded = json.loads(json.dumps(events), parse_float=lambda text: round(float(text), 3))
    return sorted(rounded, key=lambda event: event["index"])


async def answers(cluster):
    tasks = [stream(cluster, prompt, 24, **how) for prompt in PROMPTS for how in (GREEDY, SEEDED)]
    tasks += [stream(cluster, prompt, 9, **SEVERAL) for prompt in PROMPTS[:3]]
    return [by_choice(events) for events in await asyncio.gather(*tasks)]


@pytest.fixture(scope="module")
def engine(tiny_model):
    return LLMEngine.from_config(
        EngineConfig(model_path=tiny_model, cache=CacheConfig(num_blocks=512))
    )


def expected(engine, make_request, prompt, count, **sampling):
    request = make_request(prompt, max_tokens=count, ignore_eos=True, **sampling)
    return list(engine.generate([request])[0].token_ids)


async def test_same_bytes_as_the_disaggregated_cluster_and_same_tokens_as_the_engine(
    cluster_of, local_cluster_of, tiny_model, engine, make_request
):
    said = []
    for cluster_kind, kind in (
        (cluster_of, {}),
        (cluster_of, {"num_colocated": 2}),
        (local_cluster_of, {"num_colocated": 1}),
    ):
        async with cluster_kind(tiny_model, **kind) as cluster:
            said.append(await answers(cluster))
            await cluster.until_nothing_is_held(within_s=1)
    disaggregated, processes, in_process = said
    assert processes == disaggregated
    assert in_process == disaggregated
    for index, prompt in enumerate(PROMPTS):
        for offset, how in enumerate((GREEDY, SEEDED)):
            tokens = tokens_of(in_process[2 * index + offset])
            assert tokens == expected(engine, make_request, prompt, 24, **how)


async def test_a_small_pool_makes_them_wait_and_preempts_without_a_trace(
    colocated_of, tiny_model, engine, make_request
):
    prompts = [[i] * 40 for i in range(24)]
    async with colocated_of(tiny_model, num_blocks=24) as cluster:
        events = await asyncio.gather(*(stream(cluster, p, 50, **GREEDY) for p in prompts))
        for prompt, said in zip(prompts, events, strict=True):
            assert tokens_of(said) == expected(engine, make_request, prompt, 50, temperature=0.0)
        await cluster.until_nothing_is_held(within_s=1)
        requests = (await cluster.http.get("/debug/requests")).json()
        assert {life["attempts"] for life in requests["requests"]} == {1}


PHASES = {
    "queued": lambda state: state.num_waiting > 0,
    "reading": lambda state: state.num_running == 1 and state.owned > 0,
    "writing": lambda state: state.cached + state.owned > 93 and state.num_running == 1,
}


async def test_a_client_that_leaves_frees_everything(colocated_of, tiny_model):
    async with colocated_of(
        tiny_model, num_blocks=512, max_num_batched_tokens=16, max_num_seqs=1
    ) as cluster:
        rng = random.Random(5)

        def begin():
            return asyncio.create_task(
                stream(cluster, [rng.randrange(256) for _ in range(1500)], 400, **GREEDY)
            )

        for phase, reached in PHASES.items():
            tasks = [begin() for _ in range(2 if phase == "queued" else 1)]
            await cluster.until(lambda states, reached=reached: reached(states[0]))
            for task in tasks:
                assert not task.done(), phase
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await cluster.until_nothing_is_held(within_s=1)
        assert len(tokens_of(await stream(cluster, [1, 2, 3], 3, **GREEDY))) == 3


async def test_a_request_that_fails_on_its_way_fails_alone(
    colocated_of, tiny_model, engine, make_request
):
    """After one A (token 32) every token is barred."""
    async with colocated_of(tiny_model) as cluster:
        bad = {"allowed_token_ids": [32], "bad_words": ["AA"]}
        good = [stream(cluster, prompt, 20, **GREEDY) for prompt in PROMPTS]
        failed, *said = await asyncio.gather(stream(cluster, [1], 20, **bad), *good)
        assert "bar every token" in failed[0]["error"]["message"]
        for prompt, events in zip(PROMPTS, said, strict=True):
            assert tokens_of(events) == expected(engine, make_request, prompt, 20, temperature=0.0)
        await cluster.until_nothing_is_held(within_s=1)


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_streams_of_a_killed_worker_go_on_at_another(
    colocated_of, tiny_model, engine, make_request, how
):
    async with colocated_of(tiny_model, num_colocated=2, num_blocks=512) as cluster:
        victims = [cluster.workers[-1]]

        def kill(count):
            if count == 40 and victims:
                victims.pop().kill()

        prompts = [[i, i + 1] for i in range(4)]  # two on each worker
        said = await asyncio.gather(
            *(stream(cluster, p, 200, on_token=kill, **how) for p in prompts)
        )
        for prompt, events in zip(prompts, said, strict=True):
            assert tokens_of(events) == expected(engine, make_request, prompt, 200, **how)
        lives = (await cluster.http.get("/debug/requests")).json()["requests"]
        assert {life["attempts"] for life in lives} == {1, 2}


async def test_stop_while_streaming_ends_every_stream(colocated_of, tiny_model):
    async with colocated_of(tiny_model, num_blocks=512) as cluster:
        started = asyncio.Event()
        tasks = [
            asyncio.create_task(
                stream(cluster, [i], 1500, on_token=lambda _: started.set(), **GREEDY)
            )
            for i in range(4)
        ]
        await started.wait()
        await cluster.router.stop()
        said = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(item, Exception) or "error" in item[0] for item in said), said
        await cluster.until_nothing_is_held(within_s=1)


async def test_what_operators_see(colocated_of, tiny_model):
    async with colocated_of(tiny_model) as cluster:
        health = (await cluster.http.get("/health")).json()
        assert health == {"status": "ok", "workers": {"colocated": 1}, "missing": []}
        prompt = list(range(100))
        for _ in range(2):
            await stream(cluster, prompt, 12, **GREEDY)
        [again, first] = (await cluster.http.get("/debug/requests")).json()["requests"]
        assert first["prefill"]["num_prompt_tokens"] == 100
        assert (first["prefill"]["num_cached_tokens"], first["prefill"]["num_steps"]) == (0, 1)
        assert again["prefill"]["num_cached_tokens"] == again["predicted_cached_tokens"] == 96
        assert again["decode"]["num_steps"] == 11
        assert again["prefill_worker"] == again["decode_worker"]
        assert min(again["prefill"]["queue_s"], again["prefill"]["prefill_s"]) >= 0
        [row] = (await cluster.http.get("/cluster")).json()["workers"]
        assert (row["role"], row["connected"]) == ("colocated", True)
        assert row["num_cached_blocks"] > 0
        mixed = [WorkerEndpoint(role=role, address="127.0.0.1:1") for role in WorkerRole]
        with pytest.raises(ConfigError, match="do not mix"):
            await cluster.router.set_workers(mixed)
