"""Many streams at once, and clients that go away at every stage: tokens right, blocks back."""

import asyncio
import json
import random

import pytest

from core.config import CacheConfig, EngineConfig
from engine.llm_engine import LLMEngine


async def stream_tokens(cluster, prompt, max_tokens, stop_after=None):
    """Token ids as they are streamed; closes the connection after `stop_after` of them."""
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens, reasons = [], []
    async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            [choice] = event["choices"]
            tokens += choice["token_ids"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            if stop_after is not None and len(tokens) >= stop_after:
                return tokens
    assert reasons == ["length"], "exactly one finish reason"
    return tokens


@pytest.fixture(scope="module")
def colocated(tiny_model):
    config = EngineConfig(model_path=tiny_model, cache=CacheConfig(num_blocks=2048))
    return LLMEngine.from_config(config)


def mixed_prompts(count, seed=1):
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(64)]
    prompts = []
    for i in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 150, 400)))]
        prompts.append(shared + own if i % 3 == 0 else own)
    return prompts


async def test_64_concurrent_streams_through_2_prefill_and_2_decode_workers(
    cluster_of, tiny_model, colocated, make_request
):
    """Promise 1 and 4: every stream equals the colocated engine, and nothing stays behind."""
    prompts = mixed_prompts(64)
    lengths = [random.Random(i).randint(1, 40) for i in range(64)]
    expected = []
    for prompt, length in zip(prompts, lengths, strict=True):
        request = make_request(prompt, request_id="x", max_tokens=length, ignore_eos=True)
        expected.append(list(colocated.generate([request])[0].token_ids))
    async with cluster_of(tiny_model, num_prefill=2, num_decode=2, num_blocks=512) as cluster:
        streams = (stream_tokens(cluster, p, n) for p, n in zip(prompts, lengths, strict=True))
        assert await asyncio.gather(*streams) == expected
        await cluster.until_nothing_is_held(within_s=1)
        info = (await cluster.http.get("/cluster")).json()
        assert len(info["workers"]) == 4


async def test_a_pool_too_small_for_all_only_makes_them_wait(
    cluster_of, tiny_model, colocated, make_request
):
    """24 requests of up to 10 blocks over pools of 24: waiting and preemption change no token."""
    prompts = [prompt[:100] for prompt in mixed_prompts(24, seed=3)]
    requests = [
        make_request(prompt, request_id=str(i), max_tokens=50, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    expected = [list(chunk.token_ids) for chunk in colocated.generate(requests)]
    async with cluster_of(tiny_model, num_blocks=24, router={"max_attempts": 50}) as cluster:
        streams = (stream_tokens(cluster, prompt, 50) for prompt in prompts)
        assert await asyncio.gather(*streams) == expected
        await cluster.until_nothing_is_held(within_s=1)


LONG = 1500


async def test_client_killed_in_each_phase_frees_everything_within_a_second(cluster_of, tiny_model):
    """Queued, in prefill, between prefill and transfer, in decode; streamed and not."""
    async with cluster_of(tiny_model, num_blocks=512, max_num_batched_tokens=64) as cluster:
        rng = random.Random(5)

        def prompt():
            return [rng.randrange(256) for _ in range(LONG)]

        for delay in (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3):
            tasks = [
                asyncio.create_task(stream_tokens(cluster, prompt(), 400)) for _ in range(2)
            ] + [asyncio.create_task(cluster.complete(prompt(), 400))]
            await asyncio.sleep(delay)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await cluster.until_nothing_is_held(within_s=1)
        for stop_after in (1, 2, 10):  # right at the hand-over, then while decoding
            await stream_tokens(cluster, prompt(), 400, stop_after=stop_after)
            await cluster.until_nothing_is_held(within_s=1)
        assert len(await stream_tokens(cluster, prompt(), 3)) == 3, "and it still serves"


async def test_abort_storm_leaves_threads_and_blocks_as_they_were(cluster_of, tiny_model):
    async with cluster_of(tiny_model, num_prefill=2, num_decode=2, num_blocks=512) as cluster:
        await asyncio.gather(*(stream_tokens(cluster, p, 4) for p in mixed_prompts(16)))
        threads = [state.num_threads for state in await cluster.pools()]
        rng = random.Random(7)

        async def one(prompt):
            task = asyncio.create_task(stream_tokens(cluster, prompt, 60))
            await asyncio.sleep(rng.random() * 0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for seed in range(4):
            await asyncio.gather(*(one(prompt) for prompt in mixed_prompts(50, seed)))
        await cluster.until_nothing_is_held(within_s=1)
        now = [state.num_threads for state in await cluster.pools()]
        assert all(b <= a + 2 for a, b in zip(threads, now, strict=True)), (threads, now)
