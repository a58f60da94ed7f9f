"""Whole clusters of real processes: every worker its own process, KV over gloo, router in the test.

A worker process also answers a few questions over a pipe, so that a test can look into its pool
(`check()` runs on the step thread, between two steps) and count its threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass, replace

import httpx
import psutil
import pytest

from colocated_workers.server import ColocatedServer
from core.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ParallelConfig,
    RouterConfig,
    SchedulerConfig,
    TransferConfig,
    WorkerConfig,
    WorkerPool,
)
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from core.worker import WorkerInfo, WorkerRole
from decode_workers.server import DecodeServer
from deploy.cluster import Cluster as DeployedCluster
from deploy.local import InProcessLauncher
from deploy.supervisor import Supervisor
from deploy.workers import make_server
from engine.llm_engine import LLMEngine
from router.server import RouterServer, WorkerEndpoint
from router.tokenizer import load_tokenizer

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class PoolState:
    free: int
    cached: int
    owned: int
    leased: int
    quarantined: int
    num_threads: int
    num_waiting: int
    num_pulling: int
    num_running: int

    @property
    def num_held(self) -> int:
        return self.owned + self.leased + self.quarantined


def serve_worker(config: WorkerConfig, pipe) -> None:
    """Main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve_worker(config, pipe))


async def _serve_worker(config: WorkerConfig, pipe) -> None:
    server = make_server(config)
    pipe.send(await server.start())
    told = asyncio.create_task(_answer_until_stop(server, pipe))
    died = asyncio.create_task(server.wait())
    await asyncio.wait([told, died], return_when=asyncio.FIRST_COMPLETED)
    await server.stop()
    if not told.done():
        os._exit(1)  # a thread still waits for a question


async def _answer_until_stop(server, pipe) -> None:
    while await asyncio.to_thread(_receive, pipe) != "stop":
        pipe.send(await _on_step_thread(server, lambda: _pool_state(server)))


async def _on_step_thread(server, look):
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    server._server.step_loop.post(lambda: loop.call_soon_threadsafe(answer.set_result, look()))
    return await answer


def _pool_state(server) -> PoolState:
    worker, num_pulling = server.worker, 0
    if isinstance(server, ColocatedServer):
        engine = worker.engine
        waiting = engine._prefill.waiting
        running = [*engine._prefill.running, *engine._decode.running]
    elif isinstance(server, DecodeServer):
        waiting, running = worker._admission.waiting, worker._scheduler.running
        num_pulling = len(worker._pulling)
    else:
        waiting, running = worker._scheduler.waiting, worker._scheduler.running
    return PoolState(
        *server.pool.check(),
        num_threads=threading.active_count(),
        num_waiting=len(waiting),
        num_pulling=num_pulling,
        num_running=len(running),
    )


def _receive(pipe) -> str:
    try:
        return pipe.recv()
    except EOFError:
        return "stop"


class WorkerProcess:
    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve_worker, args=(config, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()

    def ready(self) -> WorkerInfo:
        assert self._pipe.poll(120), f"{self.config.name} did not start"
        self.info = self._pipe.recv()
        return self.info

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(role=self.config.role, address=self.info.address)

    def pool(self) -> PoolState:
        with self._lock:
            self._pipe.send("pool")
            assert self._pipe.poll(30), f"{self.config.name} does not answer"
            return self._pipe.recv()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def other_ranks(self) -> list[psutil.Process]:
        """The processes of ranks 1 and up."""
        children = psutil.Process(self.pid).children()
        ranks = [child for child in children if "deploy.rank_processes" in child.cmdline()]
        return sorted(ranks, key=lambda rank: rank.create_time())

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process.is_alive():
            self.thaw()
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send("stop")
            self._process.join(20)
        leaked = self._process.is_alive()
        self._process.kill()
        self._process.join(10)
        self._pipe.close()
        assert not leaked, f"{self.config.name} did not stop"


class Cluster:
    """A router in this process in front of worker processes."""

    def __init__(
        self, router: RouterServer, workers: list[WorkerProcess], http: httpx.AsyncClient
    ) -> None:
        self.router = router
        self.workers = workers
        self.http = http

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def prefill(self) -> list[WorkerProcess]:
        return [w for w in self.workers if w.config.role is WorkerRole.PREFILL]

    @property
    def decode(self) -> list[WorkerProcess]:
        return [w for w in self.workers if w.config.role is WorkerRole.DECODE]

    async def pools(self) -> list[PoolState]:
        """Of those that live."""
        living = [worker for worker in self.workers if worker.is_alive]
        return [await asyncio.to_thread(worker.pool) for worker in living]

    async def until(self, condition, within_s: float = 10.0) -> None:
        """Wait until `condition(states of all workers)` holds."""
        async with asyncio.timeout(within_s):
            while not condition(await self.pools()):
                await asyncio.sleep(0.002)

    async def until_nothing_is_held(self, within_s: float) -> None:
        """All blocks of all workers free or cached, or fail."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            states = await self.pools()
            if not any(state.num_held for state in states):
                return
            assert asyncio.get_running_loop().time() < deadline, f"still held: {states}"
            await asyncio.sleep(0.02)

    async def complete(self, prompt, max_tokens, **fields):
        """Token ids of a greedy completion that ignores EOS, streamed."""
        body = {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        reply = await self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]


def worker_config(
    role, index, model_path, num_blocks, *, cache=None, parallel=None, transfer=None, **engine
):
    scheduler = SchedulerConfig(
        max_num_batched_tokens=engine.pop("max_num_batched_tokens", 256),
        max_num_seqs=engine.pop("max_num_seqs", 32),
    )
    return WorkerConfig(
        name=f"{role.value}-{index}",
        role=role,
        served_model_name="m",
        engine=EngineConfig(
            model_path=model_path,
            cache=CacheConfig(**{"block_size": 16, "num_blocks": num_blocks, **(cache or {})}),
            parallel=parallel or ParallelConfig(),
            scheduler=scheduler,
            **engine,
        ),
        transfer=TransferConfig(
            **{"verify_checksum": True, "timeout_s": 10, "lease_s": 3, **(transfer or {})}
        ),
    )


@contextlib.asynccontextmanager
async def run_cluster(
    model_path,
    *,
    num_prefill=1,
    num_decode=1,
    num_colocated=0,
    num_blocks=256,
    prefill_cache=None,
    decode_cache=None,
    prefill_parallel=None,
    decode_parallel=None,
    router=None,
    **engine,
):
    """Start, yield, stop; asserts that no process is left. `num_colocated`: instead of others;
    `*_cache`: what the CacheConfig of those workers has of its own."""
    configs = [
        worker_config(role, index, model_path, num_blocks, cache=cache, parallel=shape, **engine)
        for role, count, cache, shape in (
            (
                WorkerRole.PREFILL,
                0 if num_colocated else num_prefill,
                prefill_cache,
                prefill_parallel,
            ),
            (WorkerRole.DECODE, 0 if num_colocated else num_decode, decode_cache, decode_parallel),
            (WorkerRole.COLOCATED, num_colocated, {}, None),
        )
        for index in range(count)
    ]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    workers = [WorkerProcess(config) for config in configs]
    server = None
    try:
        for worker in workers:
            await asyncio.to_thread(worker.ready)
        settings = RouterConfig(
            served_model_name="m", model_path=model_path, port=0, enable_debug=True
        )
        server = RouterServer(replace(settings, **(router or {})), load_tokenizer(model_path))
        await server.start()
        await server.set_workers([worker.endpoint for worker in workers])
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as http:
            cluster = Cluster(server, workers, http)
            await _healthy(cluster)
            yield cluster
    finally:
        if server is not None:
            await server.stop()
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    names = {psutil.Process(pid).cmdline()[-1] for pid in left if psutil.pid_exists(pid)}
    assert all("resource_tracker" in name for name in names), f"left running: {names}"


class RecordingLauncher(InProcessLauncher):
    def __init__(self):
        super().__init__()
        self.servers = []

    async def launch(self, config, progress):
        worker = await super().launch(config, progress)
        self.servers.append(worker.server)
        return worker


class InProcessWorker:
    """A worker of the local backend, with as much of WorkerProcess as makes sense in here."""

    is_alive = True

    def __init__(self, server) -> None:
        self.server = server
        self.pid = server.info.pid

    def pool(self) -> PoolState:
        answer = concurrent.futures.Future()
        step_loop = self.server._server.step_loop
        step_loop.post(lambda: answer.set_result(_pool_state(self.server)))
        return answer.result(30)

    def kill(self) -> None:
        """Its step thread dies of a bug."""
        self.server._server.step_loop.post(_die)


def _die():
    raise RuntimeError("killed by a test")


@contextlib.asynccontextmanager
async def run_local_cluster(model_path, *, num_colocated=1, num_blocks=256, router=None, **engine):
    """The same in this process (backend local): workers share the test's event loop."""
    worker = worker_config(WorkerRole.COLOCATED, 0, model_path, num_blocks, **engine)
    settings = RouterConfig(served_model_name="m", model_path=model_path, port=0, enable_debug=True)
    config = ClusterConfig(
        router=replace(settings, **(router or {})),
        engine=worker.engine,
        prefill=WorkerPool(count=0),
        decode=WorkerPool(count=0),
        colocated=WorkerPool(count=num_colocated),
    )
    launcher = RecordingLauncher()
    supervisor = Supervisor(config, launcher)
    async with DeployedCluster(config, supervisor, connect=launcher.connect) as deployed:
        url = deployed.url
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            workers = [InProcessWorker(server) for server in launcher.servers]
            yield Cluster(deployed.router, workers, http)


async def _healthy(cluster: Cluster) -> None:
    async with asyncio.timeout(20):
        while (await cluster.http.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def greedy():
    """`tokens(model_path, prompts, max_tokens)`: what every cluster must answer, by one engine on
    one rank."""

    def tokens(model_path, prompts, max_tokens):
        cache = CacheConfig(num_blocks=512)
        engine = LLMEngine.from_config(EngineConfig(model_path=model_path, cache=cache))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [
            GenerateRequest(
                request_id=f"{i}", model="m", prompt_token_ids=tuple(prompt), sampling=sampling
            )
            for i, prompt in enumerate(prompts)
        ]
        return [list(chunk.token_ids) for chunk in engine.generate(requests)]

    return tokens


@pytest.fixture(scope="session")
def cluster_of():
    return run_cluster


@pytest.fixture(scope="session")
def local_cluster_of():
    return run_local_cluster
