"""The cluster on Ray, whole: real actors, real transfers, real deaths, and nothing left behind."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
import ray

from core.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ParallelConfig,
    RouterConfig,
    WorkerPool,
)
from deploy.controller import Phase
from deploy.ray_cluster import RayCluster


def descendants():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def config(model, **counts):
    return ClusterConfig(
        router=RouterConfig(served_model_name="tiny", model_path=model, port=0, enable_debug=True),
        engine=EngineConfig(model_path=model, cache=CacheConfig(num_blocks=64)),
        **counts,
    )


async def complete(url, prompt, max_tokens=8):
    """Token ids of a greedy completion."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


async def until(condition, within_s=60):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_cluster_on_ray_serves_survives_a_death_and_leaves_nothing(tiny_model):
    before, seen, notes = descendants(), [], []
    prompt = list(range(1, 60))
    two_decode = config(tiny_model, decode=WorkerPool(count=2))
    cluster = RayCluster(two_decode, observer=seen.append, note=notes.append)
    async with cluster:
        ready = {slot.name: slot for slot in cluster.state.ready}
        assert set(ready) == {"prefill-0", "decode-0", "decode-1"}
        pids = {slot.pid for slot in ready.values()}
        assert len(pids) == 3
        assert os.getpid() not in pids, "each worker is a process of its own"
        assert pids < descendants()
        tokens = await complete(cluster.url, prompt)
        assert len(tokens) == 8

        os.kill(ready["prefill-0"].pid, signal.SIGKILL)
        await until(lambda: len(cluster.state.ready) == 2, within_s=5)
        await until(lambda: len(cluster.state.ready) == 3)
        again = {slot.name: slot for slot in cluster.state.ready}
        assert again["prefill-0"].address != ready["prefill-0"].address
        assert again["decode-0"] == ready["decode-0"], "nobody else was touched"
        await until(lambda: len(usable(cluster)) == 3)
        assert await complete(cluster.url, prompt) == tokens
        folder = Path(cluster.controller.log_folder)
        assert folder.is_dir()
    assert descendants() <= before
    assert not folder.exists()
    phases = [slot.phase for state in seen for slot in state.slots if slot.name == "prefill-0"]
    story = [
        phase for phase, before in zip(phases, [None, *phases], strict=False) if phase != before
    ]
    assert story == [Phase.STARTING, Phase.READY, Phase.WAITING, Phase.STARTING, Phase.READY]
    assert notes == ["starting Ray", "starting workers", "stopping workers", "stopping Ray"]


async def test_each_rank_is_an_actor_and_one_that_dies_takes_its_worker_along(tiny_model):
    before = descendants()
    prompt = list(range(1, 60))
    two_ranks = WorkerPool(parallel=ParallelConfig(tensor_parallel_size=2))
    none = WorkerPool(count=0)
    cluster = RayCluster(config(tiny_model, colocated=two_ranks, prefill=none, decode=none))
    async with cluster:
        (first,) = cluster.state.ready
        tokens = await complete(cluster.url, prompt)
        os.kill(rank_actors()[0].pid, signal.SIGKILL)
        await until(lambda: not cluster.state.ready, within_s=5)
        await until(lambda: cluster.state.ready and usable(cluster))
        (again,) = cluster.state.ready
        assert again.pid != first.pid, "no rank of a broken worker goes on"
        assert len(rank_actors()) == 1
        assert await complete(cluster.url, prompt) == tokens
    assert descendants() <= before


def rank_actors():
    processes = psutil.Process().children(recursive=True)
    return [process for process in processes if "RankActor" in "".join(process.cmdline())]


def usable(cluster):
    return [status for status in cluster.router.registry.statuses() if status.usable]


async def test_a_model_that_cannot_be_loaded_ends_the_start_with_its_reason(tiny_model, tmp_path):
    """The header looks right, the weights are cut off."""
    before = descendants()
    for file in Path(tiny_model).iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:5000] if file.suffix == ".safetensors" else data)
    cluster = RayCluster(config(str(tmp_path)))
    with pytest.raises(Exception, match=r"cannot be started: .*safetensors") as caught:
        async with cluster:
            pytest.fail("it started")
    assert caught.value.code == "config_error"
    assert [slot.phase for slot in cluster.state.failed] == [Phase.FAILED]
    assert descendants() <= before


async def test_a_start_that_is_cancelled_leaves_nothing(tiny_model):
    before = descendants()
    starting = asyncio.create_task(RayCluster(config(tiny_model)).__aenter__())
    await until(lambda: descendants() - before, within_s=20)
    assert not ray.is_initialized(), "its first daemon runs: the middle of ray.init"
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert descendants() <= before
