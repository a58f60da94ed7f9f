"""Workers as subprocesses: what they say of their end arrives, and what they log is seen."""

import asyncio
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

import pytest

from core.config import CacheConfig, EngineConfig, WorkerConfig
from core.errors import InternalError, WorkerLostError
from core.worker import WorkerRole
from deploy.processes import ProcessLauncher, ProcessWorker


@pytest.fixture
async def spawn():
    """A child that runs `program`, which finds its end of the socket pair in `connection`."""
    workers = []

    async def spawn(program):
        ours, theirs = socket.socketpair()
        with theirs:
            prelude = (
                "import sys, time, logging\n"
                "from multiprocessing.connection import Connection\n"
                "from core.errors import InternalError\n"
                "from deploy.processes import Loading\n"
                "connection = Connection(int(sys.argv[1]))\n"
            )
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", prelude + program, str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        worker = ProcessWorker(process=process, info=None, connection=Connection(ours.detach()))
        workers.append(worker)
        return worker

    yield spawn
    for worker in workers:
        await worker.stop()


async def test_last_words_of_a_worker_are_its_reason(spawn):
    worker = await spawn(
        "connection.send(Loading(stage='late', fraction=1.0))\n"
        "connection.send(InternalError('the step loop died: CUDA out of memory'))\n"
        "sys.exit(1)\n"
    )
    with pytest.raises(InternalError, match="the step loop died: CUDA out of memory"):
        await worker.wait()


async def test_a_worker_without_last_words_is_told_by_its_exit_code(spawn):
    with pytest.raises(WorkerLostError, match="ended with exit code 3"):
        await (await spawn("sys.exit(3)")).wait()
    worker = await spawn("time.sleep(60)")
    worker.process.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="ended by SIGKILL"):
        await worker.wait()


@pytest.fixture
def worker_config(tiny_model):
    return WorkerConfig(
        name="prefill-0",
        role=WorkerRole.PREFILL,
        served_model_name="tiny",
        engine=EngineConfig(model_path=tiny_model, cache=CacheConfig(num_blocks=8)),
    )


async def test_a_whole_worker_serves_and_its_death_is_told(worker_config):
    stages = []
    worker = await ProcessLauncher().launch(worker_config, lambda *stage: stages.append(stage))
    try:
        assert worker.info.pid == worker.process.pid != os.getpid()
        assert stages
        os.kill(worker.info.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            await worker.wait()
    finally:
        await worker.stop()


LOGGING = """
import asyncio, logging
from deploy import worker_process

async def serve(connection, config):
    logging.getLogger("deploy.test").info("config %s", config)
    return 0

worker_process._serve = serve
worker_process.main(sys.argv[1], str(logging.INFO))
"""


async def test_a_worker_process_logs_at_the_level_it_is_given(capfd, spawn):
    worker = await spawn(f"{LOGGING.strip()}\n")
    worker.connection.send("seven")
    assert await worker.process.wait() == 0
    assert "INFO deploy.test: config seven" in capfd.readouterr().err
