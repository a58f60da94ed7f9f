"""The registry: who is usable, and counters that always come back to zero."""

import asyncio

import pytest

from core.errors import WorkerUnavailableError
from core.prefix import hash_blocks, hash_root
from core.worker import WorkerRole
from router.registry import WorkerEndpoint


async def test_set_workers_is_idempotent_and_dynamic(make_world):
    world = await make_world(num_prefill=2, num_decode=2)
    registry = world.router.registry
    sessions = [worker.hellos for worker in world.workers.values()]
    await world.connect()
    await world.connect()
    assert [len(hellos) for hellos in sessions] == [1] * 4
    await world.router.set_workers([world["prefill-1"].endpoint])
    assert [s.worker_id.name for s in registry.snapshots(WorkerRole.PREFILL)] == ["prefill-1"]
    assert registry.snapshots(WorkerRole.DECODE) == []
    await world.until(lambda: not world["prefill-0"].outboxes)
    await world.connect()
    assert len(registry.snapshots(WorkerRole.DECODE)) == 2


async def test_workers_stand_in_the_order_they_were_given(make_world):
    world = await make_world(num_prefill=0, num_decode=0)
    endpoints = [
        WorkerEndpoint(role=WorkerRole.PREFILL, address=f"127.0.0.1:{port}") for port in range(1, 9)
    ]
    await world.router.set_workers(endpoints[2:4])
    await world.router.set_workers(endpoints)
    got = [status.endpoint for status in world.router.registry.statuses()]
    assert got == [*endpoints[2:4], *endpoints[:2], *endpoints[4:]]


@pytest.mark.parametrize("info", [{"model": "another"}, {"role": WorkerRole.DECODE}])
async def test_workers_of_another_model_or_role_are_not_used(make_world, info):
    world = await make_world(num_prefill=0)
    await world.add("odd", "prefill", info=info)
    await world.connect()
    registry = world.router.registry
    assert registry.snapshots(WorkerRole.PREFILL) == []
    assert [s.worker_id.name for s in registry.snapshots(WorkerRole.DECODE)] == ["decode-0"]
    rows = (await world.http.get("/cluster")).json()["workers"]
    assert {row["name"]: row["connected"] for row in rows} == {"odd": False, "decode-0": True}
    assert (await world.http.get("/health")).status_code == 503


async def test_limits_are_those_of_the_smallest_worker(make_world):
    world = await make_world(num_prefill=0, num_decode=0)
    registry = world.router.registry
    assert registry.limits() is None
    await world.add("p", "prefill", info={"max_model_len": 90, "vocab_size": 280})
    await world.add("d", "decode", info={"max_model_len": 80, "vocab_size": 290})
    await world.connect()
    limits = registry.limits()
    assert (limits.max_model_len, limits.vocab_size) == (80, 280)


async def test_in_flight_counts_come_back_to_zero(make_world, make_request, scripts):
    world = await make_world()
    world["prefill-0"].script = scripts.hang
    registry = world.router.registry
    [before] = registry.snapshots(WorkerRole.PREFILL)
    with (
        registry.submit(before.worker_id, make_request([1])),
        registry.computing(before.worker_id, 7),
    ):
        [during] = registry.snapshots(WorkerRole.PREFILL)
        assert (during.num_in_flight, during.num_in_flight_tokens) == (1, 7)
    with pytest.raises(RuntimeError), registry.submit(before.worker_id, make_request([2])):
        raise RuntimeError("the caller fails")
    assert registry.snapshots(WorkerRole.PREFILL) == [before]


async def test_submit_to_a_worker_that_is_gone(make_world, make_request):
    world = await make_world()
    registry = world.router.registry
    [snapshot] = registry.snapshots(WorkerRole.PREFILL)
    await world.router.set_workers(())
    gone = registry.submit(snapshot.worker_id, make_request([1]))
    with pytest.raises(WorkerUnavailableError), gone:
        pass
    registry.release(snapshot.worker_id, "r", 0)


async def test_unreachable_worker_hinders_nobody(make_world):
    world = await make_world()
    dead = WorkerEndpoint(role=WorkerRole.PREFILL, address="127.0.0.1:1")
    await world.router.set_workers([dead, *(w.endpoint for w in world.workers.values())])
    await asyncio.sleep(0.2)
    assert (await world.complete(max_tokens=2)).status_code == 200


async def test_index_follows_reports_and_forgets_lost_workers(make_world):
    """Add, remove and add again: the index equals what the workers last said."""
    world = await make_world(num_prefill=2)
    prompt = list(range(17))
    hashes = hash_blocks(prompt, 4, hash_root(model="scripted-weights"))
    worker = world["prefill-1"]
    worker.report(stored=tuple(hashes))
    await world.until(lambda: any(s.report for s in world.router.registry.statuses()))
    for _ in range(2):
        reply = await world.complete(prompt, max_tokens=1)
        life = await world.http.get(f"/debug/requests/{reply.headers['x-request-id']}")
        assert life.json()["predicted_cached_tokens"] == 16
        assert life.json()["prefill_worker"] == "prefill-1@one"
    await worker.die()
    await world.add("prefill-1", "prefill", incarnation="two", port=worker.port)
    await world.until(
        lambda: any(
            s.info and s.info.worker_id.incarnation == "two"
            for s in world.router.registry.statuses()
        )
    )
    reply = await world.complete(prompt, max_tokens=1, cache_salt="x")
    life = await world.http.get(f"/debug/requests/{reply.headers['x-request-id']}")
    assert life.json()["predicted_cached_tokens"] == 0
