"""A rank other than the first dies or stops, of a worker that gives KV or of one that takes it, and
another worker goes on: no token is lost, no block and no process stays behind.

Processes are stopped to hold the phase, which takes milliseconds otherwise.
"""

import asyncio
import contextlib

import psutil
import pytest

from core.config import ParallelConfig

PROMPTS = [[seed, *range(40 * seed)] for seed in range(1, 5)]
NUM_TOKENS = 200
PATIENCE_S = 60
"""Far more than any of it takes; who waits longer hangs."""
TP2 = ParallelConfig(tensor_parallel_size=2, step_timeout_s=2.0)
PP2 = ParallelConfig(pipeline_parallel_size=2, step_timeout_s=2.0)


@pytest.fixture
def impatient(cluster_of, tiny_model):
    """A cluster whose workers give each other up soon."""

    def make(num_prefill, num_decode):
        return cluster_of(
            tiny_model,
            num_prefill=num_prefill,
            num_decode=num_decode,
            prefill_parallel=TP2,
            decode_parallel=PP2 if num_decode > 1 else TP2,
            transfer={"timeout_s": 2.0, "lease_s": 2.0},
        )

    return make


@pytest.fixture(scope="module")
def expected(greedy, tiny_model):
    return greedy(tiny_model, PROMPTS, NUM_TOKENS)


async def until(worker, condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await asyncio.to_thread(worker.pool)):
            await asyncio.sleep(0.002)


async def until_ended(process):
    async with asyncio.timeout(PATIENCE_S):
        while process.is_alive:
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def answering(cluster):
    """All prompts at once; the answers, in order, as a task that has ended at the end."""
    answers = asyncio.gather(*(cluster.complete(prompt, NUM_TOKENS) for prompt in PROMPTS))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield answers
            await answers
    finally:
        answers.cancel()


def strike(rank, fault):
    rank.kill() if fault == "killed" else rank.suspend()


async def check_the_rest(cluster, expected):
    """What is left holds nothing, and answers."""
    await cluster.until_nothing_is_held(within_s=5)
    assert await cluster.complete(PROMPTS[0], NUM_TOKENS) == expected[0]
    await cluster.until_nothing_is_held(within_s=1)


@pytest.mark.parametrize("fault", ["killed", pytest.param("frozen", marks=pytest.mark.slow)])
async def test_a_prefill_rank_while_it_sends(impatient, expected, fault):
    async with impatient(num_prefill=2, num_decode=1) as cluster:
        assert await cluster.complete(PROMPTS[0], NUM_TOKENS) == expected[0]
        victim, other = cluster.prefill
        [decode] = cluster.decode
        [rank] = victim.other_ranks()
        decode.freeze()
        async with answering(cluster) as answers:
            for prefill in (victim, other):
                await until(prefill, lambda state: state.leased > 0 and not state.owned)
            rank.suspend()
            decode.thaw()
            await until(decode, lambda state: state.num_pulling > 0)
            if fault == "killed":
                rank.kill()
        assert answers.result() == expected
        if fault == "killed":
            await until_ended(victim)
        else:  # given up by then, where a prompt came back to it
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()
        await check_the_rest(cluster, expected)


@pytest.mark.parametrize("fault", ["killed", pytest.param("frozen", marks=pytest.mark.slow)])
async def test_a_decode_rank_while_it_pulls(impatient, expected, fault):
    async with impatient(num_prefill=1, num_decode=2) as cluster:
        for _ in cluster.decode:
            assert await cluster.complete(PROMPTS[0], NUM_TOKENS) == expected[0]
        victim = cluster.decode[0]
        [rank] = victim.other_ranks()
        rank.suspend()
        async with answering(cluster) as answers:
            await until(victim, lambda state: state.num_pulling > 0)
            if fault == "killed":
                rank.kill()
            await until_ended(victim)
        assert answers.result() == expected
        assert not psutil.pid_exists(rank.pid)
        await check_the_rest(cluster, expected)


@pytest.mark.parametrize("fault", [pytest.param("killed", marks=pytest.mark.slow), "frozen"])
async def test_a_decode_rank_while_tokens_are_decoded(impatient, expected, fault):
    async with impatient(num_prefill=1, num_decode=2) as cluster:
        victim = cluster.decode[0]
        [rank] = victim.other_ranks()
        async with answering(cluster) as answers:
            await until(victim, lambda state: state.num_running > 0)
            strike(rank, fault)
            await until_ended(victim)
        assert answers.result() == expected
        assert not psutil.pid_exists(rank.pid)
        await check_the_rest(cluster, expected)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_prefill_rank_while_tokens_are_decoded_elsewhere(impatient, expected, fault):
    async with impatient(num_prefill=2, num_decode=1) as cluster:
        victim = cluster.prefill[0]
        [rank] = victim.other_ranks()
        async with answering(cluster) as answers:
            await until(cluster.decode[0], lambda state: state.num_running == len(PROMPTS))
            strike(rank, fault)
        assert answers.result() == expected
        if fault == "killed":
            await until_ended(victim)
        else:
            rank.resume()
        await check_the_rest(cluster, expected)


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
async def test_where_nobody_is_left_every_request_ends_with_a_named_error(
    impatient, expected, role
):
    async with impatient(num_prefill=1, num_decode=1) as cluster:
        assert await cluster.complete(PROMPTS[0], NUM_TOKENS) == expected[0]
        victim = {"prefill": cluster.prefill, "decode": cluster.decode}[role][0]
        left = next(worker for worker in cluster.workers if worker is not victim)
        [rank] = victim.other_ranks()
        body = {"model": "m", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        rank.suspend()
        async with asyncio.timeout(PATIENCE_S):
            replies = await asyncio.gather(
                *(
                    cluster.http.post("/v1/completions", json={**body, "prompt": prompt})
                    for prompt in PROMPTS
                )
            )
        codes = [reply.json()["error"]["code"] for reply in replies]
        assert set(codes) <= {"worker_lost", "worker_unavailable", "rank_lost"}, codes
        await until_ended(victim)
        await until(left, lambda state: not state.num_held)
