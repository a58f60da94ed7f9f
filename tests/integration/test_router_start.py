"""A router whose start is cancelled midway leaves neither task nor socket."""

import asyncio
import socket

import pytest

from core.config import ClusterConfig, EngineConfig, RouterConfig
from deploy import cluster, router_process
from deploy.supervisor import ClusterState
from router.server import RouterServer


class Midway(RouterServer):
    """Listens, and is not done starting before it is cancelled."""

    listening: asyncio.Event

    async def start(self):
        await super().start()
        self.listening.set()
        await asyncio.Event().wait()


class Controller:
    """deploy.cluster.Controller of no workers: they are none of this test's business."""

    async def start(self):
        pass

    async def changed(self, version, timeout_s):
        return ClusterState(version=0, slots=())

    async def stop(self):
        pass


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def config(byte_tokenizer_path, free_port):
    return RouterConfig(served_model_name="m", model_path=byte_tokenizer_path, port=free_port)


@pytest.fixture
def listening(monkeypatch):
    monkeypatch.setattr(Midway, "listening", asyncio.Event(), raising=False)
    monkeypatch.setattr(router_process, "RouterServer", Midway)
    monkeypatch.setattr(cluster, "RouterServer", Midway)
    monkeypatch.setattr(cluster.Cluster, "_start_workers", Controller.start)
    return Midway.listening


async def a_router_process(config):
    await router_process.serve_router(config, (), lambda url: pytest.fail("it started"))


async def a_cluster(config):
    whole = ClusterConfig(router=config, engine=EngineConfig(model_path=config.model_path))
    async with cluster.Cluster(whole, Controller()):
        pytest.fail("it started")


@pytest.mark.parametrize("serve", [a_router_process, a_cluster])
async def test_a_start_cancelled_midway_leaves_nothing(serve, config, listening, free_port):
    before = asyncio.all_tasks()
    starting = asyncio.create_task(serve(config))
    async with asyncio.timeout(10):
        await listening.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert asyncio.all_tasks() == before
    socket.create_server(("127.0.0.1", free_port)).close()
