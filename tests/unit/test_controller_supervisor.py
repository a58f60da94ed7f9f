"""deploy.supervisor: workers are launched, watched, restarted and stopped; nothing is left."""

import asyncio
import os
from dataclasses import dataclass, field

import pytest

from core.config import ClusterConfig, EngineConfig, RouterConfig, WorkerPool
from core.errors import ModelLoadError, WorkerLostError
from core.kv import KVLayout
from core.worker import WorkerId, WorkerInfo
from deploy import controller
from deploy import supervisor as supervising
from deploy.controller import Desired, Phase
from deploy.supervisor import Supervisor

LAYOUT = KVLayout(
    model="m", dtype="float32", block_size=16, first_layer=0, num_layers=1, num_kv_heads=1,
    head_dim=8,
)  # fmt: skip


@dataclass
class Worker:
    """Lives on this event loop until it is told to die."""

    info: WorkerInfo
    end: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stopped: int = 0

    async def wait(self):
        await self.end

    async def stop(self):
        self.stopped += 1

    def die(self, error):
        self.end.set_exception(error)


class Launcher:
    """The seam's smallest implementation: workers that are only promises."""

    def __init__(self):
        self.launched = []
        self.failures = {}

    async def launch(self, config, progress):
        progress("loading", 0.5)
        await asyncio.sleep(0)
        if error := self.failures.get(config.name):
            raise error
        number = len(self.launched)
        info = WorkerInfo(
            worker_id=WorkerId(name=config.name, incarnation=str(number)),
            role=config.role, address=f"127.0.0.1:{number + 1}", model="m", layout=LAYOUT,
            num_blocks=2, max_model_len=8, max_num_seqs=1, vocab_size=9, num_threads=1,
            device="cpu", pid=os.getpid(),
        )  # fmt: skip
        worker = Worker(info)
        self.launched.append(worker)
        return worker

    def live(self):
        return [worker for worker in self.launched if not worker.stopped]


@pytest.fixture
def config():
    return ClusterConfig(
        router=RouterConfig(served_model_name="m", model_path="m"),
        engine=EngineConfig(model_path="m"),
        prefill=WorkerPool(count=1),
        decode=WorkerPool(count=2),
    )


@pytest.fixture
def launcher():
    return Launcher()


@pytest.fixture
async def supervisor(config, launcher, monkeypatch):
    monkeypatch.setattr(controller, "FIRST_BACKOFF_S", 0.05)
    supervisor = Supervisor(config, launcher)
    await supervisor.start()
    yield supervisor
    await supervisor.stop()
    assert launcher.live() == []
    assert [task for task in asyncio.all_tasks() if "_run" in repr(task.get_coro())] == []


async def until(supervisor, condition):
    state = supervisor.state()
    async with asyncio.timeout(5):
        while not condition(state):
            state = await supervisor.changed(state.version, 1.0)
    return state


def all_ready(state):
    return bool(state.slots) and len(state.ready) == len(state.slots)


async def test_everything_desired_becomes_ready(supervisor, launcher):
    state = await until(supervisor, all_ready)
    assert [slot.name for slot in state.slots] == ["prefill-0", "decode-0", "decode-1"]
    assert {slot.address for slot in state.slots} == {w.info.address for w in launcher.launched}


async def test_dead_worker_is_reported_at_once_and_comes_back_elsewhere(supervisor, launcher):
    before = await until(supervisor, all_ready)
    launcher.launched[1].die(WorkerLostError("killed"))
    dead = await until(supervisor, lambda state: len(state.ready) == 2)
    (slot,) = [slot for slot in dead.slots if slot.phase is not Phase.READY]
    assert (slot.error, slot.address) == ("killed", None)
    after = await until(supervisor, all_ready)
    assert len(launcher.launched) == 4
    old = {slot.name: slot.address for slot in before.slots}
    new = {slot.name: slot.address for slot in after.slots}
    assert [name for name in new if new[name] != old[name]] == [slot.name]


@pytest.mark.parametrize("failure", ["hangs", "raises"])
async def test_a_stop_that_fails_does_not_hide_why_the_worker_died(
    supervisor, launcher, monkeypatch, failure
):
    monkeypatch.setattr(supervising, "STOP_TIMEOUT_S", 0.02)
    await until(supervisor, all_ready)
    worker = launcher.launched[0]

    async def stop():
        worker.stopped += 1
        if failure == "raises":
            raise OSError("cannot stop")
        await asyncio.Event().wait()

    worker.stop = stop
    worker.die(WorkerLostError("out of memory"))
    dead = await until(supervisor, lambda state: len(state.ready) == 2)
    assert [slot.error for slot in dead.slots if slot.phase is not Phase.READY] == ["out of memory"]
    assert worker.stopped == 1


async def test_bad_model_is_given_up_with_its_reason(config, launcher):
    launcher.failures["decode-1"] = ModelLoadError("no such tensor")
    supervisor = Supervisor(config, launcher)
    await supervisor.start()
    state = await until(supervisor, lambda state: state.failed)
    assert [(slot.name, slot.error, slot.fatal) for slot in state.failed] == [
        ("decode-1", "no such tensor", True)
    ]
    await supervisor.stop()
    assert launcher.live() == []


async def test_scaling_down_and_up(supervisor, launcher):
    await until(supervisor, all_ready)
    await supervisor.scale(Desired(num_prefill=1, num_decode=1))
    assert [slot.name for slot in supervisor.state().slots] == ["prefill-0", "decode-0"]
    await supervisor.scale(Desired(num_prefill=2, num_decode=2))
    state = await until(supervisor, all_ready)
    assert len(state.slots) == len(launcher.live()) == 4


async def test_changed_returns_after_its_timeout_when_nothing_happens(supervisor):
    state = await until(supervisor, all_ready)
    assert await supervisor.changed(state.version, 0.01) == state


async def test_progress_from_another_thread_is_seen(config, launcher):
    gate = asyncio.Event()

    async def launch(config, progress):
        await asyncio.to_thread(progress, "loading weights", 0.25)
        await gate.wait()
        return await Launcher.launch(launcher, config, progress)

    launcher.launch = launch
    supervisor = Supervisor(config, launcher)
    await supervisor.start()
    await until(supervisor, lambda state: all(slot.fraction == 0.25 for slot in state.slots))
    gate.set()
    await until(supervisor, all_ready)
    await supervisor.stop()


async def test_stop_while_starting_leaves_nothing(config, launcher):
    supervisor = Supervisor(config, launcher)
    await supervisor.start()
    await supervisor.stop()
    assert launcher.live() == []
    assert supervisor.state().slots == ()
