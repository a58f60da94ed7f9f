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


PHASES = {
    "queued": lambda prefill, decode: prefill.num_waiting == 1,
    "prefill": lambda prefill, decode: prefill.num_running == 1 and prefill.owned > 0,
    "decode": lambda prefill, decode: decode.num_running == 1,
}


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
async def test_client_killed_in_each_phase_frees_everything_within_a_second(
    cluster_of, tiny_model, streamed
):
    """The phase is seen from inside the workers, then the connection is cut."""
    async with cluster_of(tiny_model, num_blocks=512, max_num_batched_tokens=16) as cluster:
        rng = random.Random(5)
        ask = stream_tokens if streamed else type(cluster).complete

        def begin():
            prompt = [rng.randrange(256) for _ in range(1500)]
            return asyncio.create_task(ask(cluster, prompt, 400))

        async def cut(*tasks):
            for task in tasks:
                assert not task.done(), task
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await cluster.until_nothing_is_held(within_s=1)

        for phase, reached in PHASES.items():
            ahead = [begin()] if phase == "queued" else []
            task = begin()
            await cluster.until(lambda states, reached=reached: reached(*states))
            await cut(task, *ahead)
        assert len(await stream_tokens(cluster, [1, 2, 3], 3)) == 3, "and it still serves"


async def until_worker(worker, condition, within_s=5.0):
    """Wait for one worker's state while another may be frozen."""
    async with asyncio.timeout(within_s):
        while not condition(await asyncio.to_thread(worker.pool)):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("phase", ["handed over", "transfer"])
async def test_client_killed_between_prefill_and_decode(cluster_of, tiny_model, phase):
    """Processes are stopped to hold the phase, which takes milliseconds otherwise.

    Handed over: the KV waits at the prefill worker and nobody pulls. Transfer: the decode worker
    has posted its receive and the prefill worker does not send.
    """
    async with cluster_of(tiny_model, num_blocks=512) as cluster:
        prefill, decode = cluster.workers
        assert len(await stream_tokens(cluster, [1, 2, 3], 3)) == 3
        decode.freeze()
        task = asyncio.create_task(stream_tokens(cluster, range(200), 50))
        await until_worker(prefill, lambda state: state.leased > 0)
        if phase == "transfer":
            prefill.freeze()
            decode.thaw()
            await until_worker(decode, lambda state: state.num_pulling == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if phase == "handed over":
            await until_worker(prefill, lambda state: not state.num_held, within_s=1)
        else:
            await until_worker(decode, lambda state: state.quarantined == 13, within_s=1)
        prefill.thaw()
        decode.thaw()
        await cluster.until_nothing_is_held(within_s=1)
        assert len(await stream_tokens(cluster, range(200), 5)) == 5, "and it still serves"


async def test_abort_storm_leaves_threads_and_blocks_as_they_were(cluster_of, tiny_model):
    async with cluster_of(tiny_model, num_prefill=2, num_decode=2, num_blocks=512) as cluster:
        # Each decode worker has threads for each prefill worker that it has met: all must meet.
        for seed in (8, 9):
            await asyncio.gather(*(stream_tokens(cluster, p, 4) for p in mixed_prompts(50, seed)))
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
