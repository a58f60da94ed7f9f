"""The life of a request through a live router: recovery, fencing, and nothing left behind."""

import asyncio
import json

import pytest

from core.errors import (
    HandshakeRefusedError,
    InternalError,
    OverloadedError,
    PreemptedError,
    StaleHandleError,
    TransferError,
)

PROMPT = [1, 2, 3, 4, 5, 6]


async def token_ids(world, count, prompt=PROMPT, **fields):
    reply = await world.complete(prompt, max_tokens=count, ignore_eos=True, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


async def life_of(world, reply):
    return (await world.http.get(f"/debug/requests/{reply.headers['x-request-id']}")).json()


@pytest.mark.parametrize("count", [1, 2, 3, 50])
async def test_tokens_come_through_both_workers(world, scripts, count):
    assert await token_ids(world, count) == scripts.right_tokens(PROMPT, count)
    await world.until_nothing_is_held()
    assert len(world["decode-0"].requests) == (count > 1), "one token needs no decode worker"


async def test_lifetime_is_filled_in(world):
    reply = await world.complete(PROMPT, max_tokens=5, ignore_eos=True)
    life = await life_of(world, reply)
    stamps = ["arrived", "tokenized", "prefill_sent", "first_token", "decode_sent", "second_token"]
    times = [life[name] for name in [*stamps, "finished"]]
    assert times == sorted(times)
    assert life["prefill_worker"] == "prefill-0@one"
    assert life["decode_worker"] == "decode-0@one"
    assert (life["num_prompt_tokens"], life["num_output_tokens"]) == (6, 5)
    assert (life["attempts"], life["outcome"]) == (1, "length")
    assert life["prefill"]["num_prompt_tokens"] == 6
    assert life["decode"]["num_pulled_blocks"] == 2
    assert life["tpot_s"] > 0
    assert life["notes"] == []


@pytest.mark.parametrize("error", [TransferError("cut"), StaleHandleError("old")], ids=repr)
async def test_a_lost_transfer_is_routed_again_with_the_tokens_so_far(world, scripts, error):
    world["decode-0"].scripts = [scripts.fail(error)]
    reply = await world.complete(PROMPT, max_tokens=9, ignore_eos=True)
    assert reply.json()["choices"][0]["token_ids"] == scripts.right_tokens(PROMPT, 9)
    await world.until_nothing_is_held()
    first, second = world["prefill-0"].requests
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.output_token_ids == tuple(scripts.right_tokens(PROMPT, 1))
    life = await life_of(world, reply)
    assert life["attempts"] == 2
    assert error.code in life["notes"][0]
    assert reply.json()["usage"]["completion_tokens"] == 9


async def test_decode_worker_death_continues_on_another(make_world, scripts):
    world = await make_world(num_decode=2)
    world["decode-0"].scripts = [scripts.decode_then(7, scripts.die)]
    expected = scripts.right_tokens(PROMPT, 40)
    tokens = [await token_ids(world, 40) for _ in range(4)]
    assert tokens == [expected] * 4
    await world.until_nothing_is_held()
    retried = [r for worker in world.prefill for r in worker.requests if r.attempt == 1]
    assert [len(r.output_token_ids) for r in retried] == [8]


async def test_prefill_worker_death_costs_a_retry(make_world, scripts):
    world = await make_world(num_prefill=2)
    world["prefill-0"].scripts = [scripts.die]
    assert await token_ids(world, 5) == scripts.right_tokens(PROMPT, 5)
    assert await token_ids(world, 5) == scripts.right_tokens(PROMPT, 5)
    await world.until_nothing_is_held()


async def test_two_deaths_quarantine_the_request(make_world, scripts):
    """Two victims are enough: the third worker never sees it."""
    world = await make_world(num_decode=3, max_attempts=10)
    for worker in world.decode:
        worker.script = scripts.die
    reply = await world.complete(PROMPT, max_tokens=5, ignore_eos=True)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert sum(len(worker.requests) for worker in world.decode) == 2
    life = await life_of(world, reply)
    assert len(life["notes"]) == 2


async def test_attempts_are_bounded(make_world, scripts):
    world = await make_world(max_attempts=3)
    world["decode-0"].script = scripts.fail(TransferError("cut"))
    reply = await world.complete(PROMPT, max_tokens=50, ignore_eos=True)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "transfer_failed"
    assert len(world["decode-0"].requests) == 3
    await world.until_nothing_is_held()


async def test_refused_pair_is_not_tried_again_but_others_are(make_world, scripts):
    world = await make_world(num_prefill=2, num_decode=2, max_attempts=10)
    refused = []

    async def picky(call):
        if call.handle.worker == "prefill-1" and call.worker.name == "decode-1":
            await scripts.honest_decode(call)
        else:
            refused.append((call.handle.worker, call.worker.name))
            call.fail(HandshakeRefusedError("layouts differ"))

    for worker in world.decode:
        worker.script = picky
    assert await token_ids(world, 5) == scripts.right_tokens(PROMPT, 5)
    assert len(refused) == len(set(refused)) <= 3
    await world.until_nothing_is_held()


async def test_a_single_refused_pair_ends_without_a_loop(make_world, scripts):
    world = await make_world(max_attempts=10)
    world["decode-0"].script = scripts.fail(HandshakeRefusedError("layouts differ"))
    reply = await world.complete(PROMPT, max_tokens=5)
    assert reply.status_code == 503
    assert len(world["decode-0"].requests) == 1
    await world.until_nothing_is_held()


async def test_preemption_is_no_failure(make_world, scripts):
    """Each attempt yields a token at least, so even 20 of them end."""
    world = await make_world(max_attempts=1)

    async def preempt(call):
        call.fail(PreemptedError("older sequences needed its blocks"))

    world["decode-0"].scripts = [scripts.decode_then(1, preempt)] * 10
    assert await token_ids(world, 40) == scripts.right_tokens(PROMPT, 40)
    await world.until_nothing_is_held()


@pytest.mark.parametrize(
    ("error", "status"), [(InternalError("secret /path"), 500), (OverloadedError("full"), 429)]
)
async def test_other_errors_end_the_request(world, scripts, error, status):
    world["prefill-0"].script = scripts.fail(error)
    reply = await world.complete(PROMPT)
    assert reply.status_code == status
    assert "secret" not in reply.text
    assert len(world["prefill-0"].requests) == 1
    await world.until_nothing_is_held()


@pytest.mark.parametrize("stuck", ["prefill-0", "decode-0"])
async def test_deadline_ends_a_hanging_request_everywhere(make_world, scripts, stuck):
    world = await make_world(request_timeout_s=0.3)
    world[stuck].script = scripts.hang
    reply = await world.complete(PROMPT, max_tokens=5, ignore_eos=True)
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    await world.until_nothing_is_held()


async def test_deadline_after_headers_is_an_error_event(make_world, scripts):
    world = await make_world(request_timeout_s=0.3)
    world["decode-0"].script = scripts.decode_then(3, scripts.hang)
    events = await world.stream(model="m", prompt=PROMPT, max_tokens=50, ignore_eos=True)
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in events
    await world.until_nothing_is_held()


@pytest.mark.parametrize("stage", ["prefill-0", "decode-0", "mid-decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_frees_everything(world, scripts, stage, stream):
    if stage == "mid-decode":
        worker = world["decode-0"]
        worker.script = scripts.decode_then(3, scripts.hang)
    else:
        worker = world[stage]
        worker.script = scripts.hang
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 50, "stream": stream, "ignore_eos": True}
    task = asyncio.create_task(world.http.post("/v1/completions", json=body))
    await world.until(lambda: worker.requests and worker.tasks)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.until_nothing_is_held()
    recent = (await world.http.get("/debug/requests")).json()["requests"]
    assert [life["outcome"] for life in recent] == ["aborted"]


async def test_abort_storm_leaves_nothing(make_world, rng):
    world = await make_world(num_prefill=2, num_decode=2)
    for worker in world.decode:
        worker.step_s = 0.001

    async def one(stream):
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        task = asyncio.create_task(
            world.http.post("/v1/completions", json={**body, "stream": stream})
        )
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(one(bool(i % 2)) for i in range(100)))
    await world.until_nothing_is_held()
    assert (await world.complete(PROMPT, max_tokens=3)).status_code == 200


async def test_zombie_outputs_are_ignored_and_counted(world, scripts):
    """A worker that goes on after its attempt was given up cannot write into the answer."""
    zombies = []

    async def zombie(call):
        zombies.append(call)
        call.fail(TransferError("cut"))

    world["decode-0"].scripts = [zombie]

    async def haunted(call):
        for token in (7, 8, 9):
            zombies[0].send(token)
        await scripts.honest_decode(call)

    world["decode-0"].script = haunted
    assert await token_ids(world, 10) == scripts.right_tokens(PROMPT, 10)
    [status] = [s for s in world.router.registry.statuses() if s.endpoint.role == "decode"]
    assert status.num_unknown_outputs == 3


async def test_stop_string_ends_the_work_too(world):
    """The worker knows no stop strings; the router aborts it."""
    world.say("one two three " * 10)
    world["decode-0"].step_s = 0.002
    reply = await world.complete(stop="three", max_tokens=100)
    [choice] = reply.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")
    assert (await life_of(world, reply))["outcome"] == "stop"
    await world.until_nothing_is_held()


async def test_removed_worker_hands_its_requests_over(make_world, scripts):
    world = await make_world(num_decode=2, max_attempts=2)
    for worker in world.decode:
        worker.script = scripts.decode_then(3, scripts.hang)
    task = asyncio.create_task(token_ids(world, 30))
    await world.until(lambda: any(worker.requests for worker in world.decode))
    await asyncio.sleep(0.05)
    busy, idle = sorted(world.decode, key=lambda worker: not worker.requests)
    idle.script = None
    await world.router.set_workers([world["prefill-0"].endpoint, idle.endpoint])
    assert await task == scripts.right_tokens(PROMPT, 30)
    await busy.die()


async def test_a_frozen_worker_gets_no_more_while_another_is_left(make_world, scripts, monkeypatch):
    monkeypatch.setattr("router.worker_client.SUSPECT_AFTER_S", 0.1)
    world = await make_world(num_decode=2)
    frozen, _ = world.decode
    frozen.script = scripts.hang
    tasks = [asyncio.create_task(token_ids(world, 5)) for _ in range(2)]
    suspects = world.router.registry.statuses
    await world.until(lambda: any(s.suspect for s in suspects()))
    num_before = len(frozen.requests)
    for _ in range(4):  # the other one would be the busier one
        tasks.append(asyncio.create_task(token_ids(world, 5)))
    await asyncio.gather(*tasks[2:])
    assert len(frozen.requests) == num_before == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await world.until_nothing_is_held()


async def test_no_prefill_is_wasted_when_nobody_could_decode(world):
    await world.router.set_workers([world["prefill-0"].endpoint])
    reply = await world.complete(PROMPT, max_tokens=5)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_unavailable")
    assert world["prefill-0"].requests == []


async def test_burst_of_equal_prompts_meets_on_one_worker_until_it_is_too_loaded(make_world):
    """The first decision is entered into the index at once."""
    world = await make_world(num_prefill=2)
    prompt = list(range(100))
    await world.complete(prompt, max_tokens=1)
    [first] = [worker for worker in world.prefill if worker.requests]
    for _ in range(3):
        reply = await world.complete(prompt, max_tokens=1)
        assert (await life_of(world, reply))["predicted_cached_tokens"] == 99
    assert len(first.requests) == 4


async def test_burst_of_different_prompts_spreads(make_world, scripts, rng):
    world = await make_world(num_prefill=2, num_decode=2)
    for worker in world.prefill:
        worker.script = scripts.hang
    prompts = [[rng.randrange(256) for _ in range(50)] for _ in range(40)]
    tasks = [asyncio.create_task(world.complete(prompt)) for prompt in prompts]
    await world.until(lambda: sum(len(worker.requests) for worker in world.prefill) == 40)
    assert [len(worker.requests) for worker in world.prefill] == [20, 20]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await world.until_nothing_is_held()


async def test_debug_shows_no_prompt(world):
    await world.complete(b"my secret prompt", max_tokens=2)
    text = json.dumps((await world.http.get("/debug/requests")).json())
    assert "secret" not in text
    assert str(list(b"my secret")) not in text
