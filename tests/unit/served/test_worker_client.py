"""Sessions with workers: reconnecting, fencing, and streams that always end."""

import asyncio
import contextlib
import logging
import threading

import pytest

from core.errors import InternalError, WorkerLostError, WorkerUnavailableError
from core.request import FinishReason
from core.worker import WorkerReport
from protocol import worker_pb2 as pb
from protocol import worker_server
from protocol.worker_server import MIN_PING_INTERVAL_MS, StepResult, WorkerServer
from router import worker_client
from router.worker_client import WorkerClient


class Listener:
    def __init__(self):
        self.reports = []
        self.lost = []

    def worker_reported(self, info, report):
        self.reports.append((info.worker_id, report))

    def worker_lost(self, info):
        self.lost.append(info.worker_id)


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
async def pair(make_world, listener):
    """A scripted prefill worker and a client of its own, beside the router's."""
    world = await make_world()
    worker = world["prefill-0"]
    client = WorkerClient(worker.address, listener, router_id="test")
    client.start()
    await world.until(lambda: client.info is not None)
    yield world, worker, client
    await client.close()


async def test_hello_info_and_reports(pair, listener):
    world, worker, client = pair
    assert client.info.worker_id == worker.worker_id
    await world.until(lambda: "test" in worker.hellos)
    worker.report(num_running=3)
    await world.until(lambda: listener.reports)
    assert listener.reports[0][0] == worker.worker_id
    assert client.report.num_running == 3


async def test_outputs_go_to_their_requests(pair, make_request):
    _, worker, client = pair

    async def echo(call):
        for token in call.request.prompt_token_ids:
            call.send(token)
            await asyncio.sleep(0)
        call.send(0, finish_reason=FinishReason.STOP)

    worker.script = echo

    async def ask(index):
        request = make_request([index] * index, request_id=f"r{index}")
        with client.submit(request) as outputs:
            return [token async for output in outputs for token in output.token_ids]

    answers = await asyncio.gather(*(ask(i) for i in range(1, 30)))
    assert answers == [[i] * i + [0] for i in range(1, 30)]
    assert len(client.streams) == 0
    assert worker.aborted == []


async def test_leaving_early_aborts(pair, make_request, scripts):
    world, worker, client = pair

    async def stutter(call):
        call.send(1)
        await scripts.hang(call)

    worker.script = stutter
    with client.submit(make_request([1], attempt=3)) as outputs:
        assert (await anext(outputs)).token_ids == (1,)
    await world.until(lambda: worker.aborted == [("r", 3)])
    assert len(client.streams) == 0


async def test_error_ends_the_stream_without_an_abort(pair, make_request, scripts):
    _, worker, client = pair
    worker.script = scripts.fail(InternalError("boom"))
    with client.submit(make_request([1])) as outputs, pytest.raises(InternalError, match="boom"):
        await anext(outputs)
    await asyncio.sleep(0.05)
    assert worker.aborted == []


async def test_all_streams_end_when_the_worker_dies_and_it_comes_back_as_another(
    pair, make_request, scripts, listener
):
    world, worker, client = pair
    worker.script = scripts.hang

    async def ask(index):
        with client.submit(make_request([1], request_id=f"r{index}")) as outputs:
            await anext(outputs)

    tasks = [asyncio.create_task(ask(index)) for index in range(20)]
    await world.until(lambda: len(worker.tasks) == 20)
    await worker.die()
    errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert all(isinstance(error, WorkerLostError) for error in errors)
    assert client.info is None
    assert listener.lost == [worker.worker_id]
    with pytest.raises(WorkerUnavailableError):
        client.submit(make_request([1]))

    heir = await world.add("prefill-0", "prefill", incarnation="two", port=worker.port)
    await world.until(lambda: client.info is not None)
    assert client.info.worker_id == heir.worker_id != worker.worker_id
    with client.submit(make_request([1], max_tokens=1)) as outputs:
        assert (await anext(outputs)).finish_reason is FinishReason.LENGTH


async def test_a_worker_that_is_not_there_yet_is_found_later(make_world, listener):
    world = await make_world()
    probe = await world.add("late", "prefill")
    await probe.die()
    client = WorkerClient(probe.address, listener, router_id="test")
    client.start()
    await asyncio.sleep(0.3)
    assert client.info is None
    await world.add("late", "prefill", port=probe.port)
    await world.until(lambda: client.info is not None, within_s=10)
    await client.close()


async def test_unreadable_output_fails_its_request_alone(pair, make_request, scripts):
    _, worker, client = pair

    async def nonsense(call):
        output = pb.SequenceOutput(request_id="bad", attempt=0, finish_reason="because")
        call.outbox.put_nowait(pb.WorkerMessage(step=pb.StepOutputs(outputs=[output])))

    worker.scripts = [nonsense, scripts.honest_prefill]
    bad = client.submit(make_request([1], request_id="bad"))
    with bad as outputs, pytest.raises(InternalError):
        await anext(outputs)
    with client.submit(make_request([1], request_id="good", max_tokens=1)) as outputs:
        assert (await anext(outputs)).finish_reason is FinishReason.LENGTH


async def test_an_error_nobody_foresaw_costs_the_session_and_no_more(
    pair, make_request, scripts, listener, monkeypatch, caplog
):
    world, worker, client = pair
    worker.script = scripts.hang

    def explode(info, report):
        monkeypatch.undo()
        raise RuntimeError("a bug")

    with client.submit(make_request([1])) as outputs:
        await world.until(lambda: worker.tasks)
        monkeypatch.setattr(listener, "worker_reported", explode)
        worker.report()
        with pytest.raises(WorkerLostError):
            await anext(outputs)
    assert "RuntimeError: a bug" in caplog.text
    await world.until(lambda: client.info is not None)
    assert client.num_sessions == 2
    worker.report()
    await world.until(lambda: listener.reports)


async def test_proxies_of_the_environment_are_not_for_workers(pair, listener, monkeypatch):
    world, worker, _ = pair
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    client = WorkerClient(worker.address, listener, router_id="test")
    client.start()
    await world.until(lambda: client.info is not None)
    await client.close()


async def test_silence_with_work_makes_a_suspect_and_a_word_clears_it(
    pair, make_request, scripts, monkeypatch, caplog
):
    world, worker, client = pair
    monkeypatch.setattr(worker_client, "SUSPECT_AFTER_S", 0.1)
    await client.close()
    client = WorkerClient(worker.address, Listener(), router_id="test")
    client.start()
    await world.until(lambda: client.info is not None)
    await asyncio.sleep(0.3)
    assert not client.suspect, "idle workers may be silent"
    worker.script = scripts.hang
    with caplog.at_level(logging.WARNING), client.submit(make_request([1])):
        await world.until(lambda: client.suspect)
        assert "silent" in caplog.text
        worker.report()
        await world.until(lambda: not client.suspect)
    await client.close()


async def test_close_ends_streams(pair, make_request, scripts):
    _, worker, client = pair
    worker.script = scripts.hang
    with client.submit(make_request([1])) as outputs:
        await client.close()
        with pytest.raises(WorkerUnavailableError):
            await anext(outputs)


async def test_close_leaves_no_task(pair, make_request, scripts):
    """None of ours even for one turn of the loop: whoever closes may stop the loop next. gRPC's own
    may take a moment."""
    world, worker, _ = pair
    worker.script = scripts.hang
    before = asyncio.all_tasks()
    client = WorkerClient(worker.address, Listener(), router_id="another")
    client.start()
    await world.until(lambda: client.info is not None)
    with client.submit(make_request([1])):
        await client.close()

    def left(*prefixes):
        names = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - before}
        return [name for name in names if name.startswith(prefixes)]

    assert left("WorkerClient.", "_write") == []
    await world.until(lambda: not left("StreamStreamCall.", "_AioCall."))


async def test_lost_sessions_leave_no_task(pair):
    world, worker, client = pair
    counts = []
    for number in range(4):
        await worker.die()
        await world.until(lambda: client.info is None)
        worker = await world.add(
            "prefill-0", "prefill", incarnation=f"again-{number}", port=worker.port
        )
        await world.until(
            lambda w=worker: (
                (client.info and client.info.worker_id) == w.worker_id
                and all(s.info for s in world.router.registry.statuses())
            )
        )
        await asyncio.sleep(0.1)
        counts.append(len(asyncio.all_tasks()))
    assert counts[-1] <= counts[0], counts


def test_pings_are_rarer_than_workers_allow():
    options = dict(worker_client._CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] > MIN_PING_INTERVAL_MS


class Busy:
    """A front end inside one long step."""

    def __init__(self):
        self.step_ends = threading.Event()

    def step(self):
        self.step_ends.wait(60)
        return StepResult([], worked=False)

    def report(self):
        return WorkerReport(
            sequence_number=1,
            num_waiting=0,
            num_running=0,
            num_queued_tokens=0,
            num_free_blocks=0,
            num_leased_blocks=0,
            num_cached_blocks=0,
            num_blocks=0,
        )

    snapshot = report


@pytest.fixture
async def make_busy(world, monkeypatch):
    """A client that pings once a second, and its worker, which does nothing but one step."""
    options = dict(worker_client._CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1000}
    monkeypatch.setattr(worker_client, "_CHANNEL_OPTIONS", tuple(options.items()))
    async with contextlib.AsyncExitStack() as stack:

        async def make(allowed_ms):
            monkeypatch.setattr(worker_server, "MIN_PING_INTERVAL_MS", allowed_ms)
            server, busy, listener = WorkerServer(), Busy(), Listener()
            port = server.bind("127.0.0.1", 0)
            await server.start(busy, world["prefill-0"].worker_info())
            stack.push_async_callback(server.stop)
            stack.callback(busy.step_ends.set)
            client = WorkerClient(f"127.0.0.1:{port}", listener, router_id="test")
            client.start()
            stack.push_async_callback(client.close)
            await world.until(lambda: client.info is not None)
            return listener

        yield make


async def test_a_long_step_of_the_worker_does_not_end_the_session(world, make_busy):
    """Keepalive pings during a silence make gRPC servers hang up ("too many pings") unless told
    otherwise. A second worker, which was not, shows that these pings would have been too many."""
    tolerant = await make_busy(allowed_ms=100)
    strict = await make_busy(allowed_ms=60_000)
    await world.until(lambda: strict.lost, within_s=15)
    await asyncio.sleep(0.5)
    assert tolerant.lost == []
