"""The served worker over real gRPC: sessions, fencing, broken streams, a dying step thread."""

import asyncio
import gc
import threading
from collections import deque
from dataclasses import replace

import grpc
import pytest

from core.errors import (
    ConfigError,
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
)
from core.kv import KVLayout
from core.request import FinishReason, SequenceOutput
from core.worker import WorkerId, WorkerInfo, WorkerReport, WorkerRole
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import output_from_proto, report_from_proto, request_to_proto
from protocol.worker_server import StepResult, WorkerServer


class EchoWorker:
    """Answers each request with its prompt, one token per step; refuses long prompts."""

    def __init__(self):
        self.live: dict[tuple[str, int], deque[int]] = {}
        self.aborted: list[tuple[str, int]] = []
        self.num_reports = 0
        self.broken = False

    def submit(self, request, handle):
        if len(request.prompt_token_ids) > 100:
            raise ContextLengthError("too long", param="prompt")
        self.live[request.request_id, request.attempt] = deque(request.prompt_token_ids)

    def abort(self, request_id, attempt):
        if self.live.pop((request_id, attempt), None) is not None:
            self.aborted.append((request_id, attempt))

    def step(self):
        if self.broken:
            raise RuntimeError("broken on purpose")
        outputs = []
        for (request_id, attempt), tokens in list(self.live.items()):
            token = tokens.popleft()
            reason = None if tokens else FinishReason.STOP
            outputs.append(
                SequenceOutput(
                    request_id=request_id,
                    attempt=attempt,
                    token_ids=(token,),
                    finish_reason=reason,
                )
            )
            if reason:
                del self.live[request_id, attempt]
        return StepResult(outputs, worked=bool(outputs))

    def _report(self, stored=()):
        return WorkerReport(
            sequence_number=self.num_reports,
            num_waiting=0,
            num_running=len(self.live),
            num_queued_tokens=0,
            num_free_blocks=1,
            num_leased_blocks=0,
            num_cached_blocks=0,
            num_blocks=1,
            stored=stored,
        )

    def report(self):
        self.num_reports += 1
        return self._report()

    def snapshot(self):
        return self._report(stored=(b"x" * 16,))


INFO = WorkerInfo(
    worker_id=WorkerId(name="w", incarnation="i"),
    role=WorkerRole.PREFILL,
    address="here",
    model="m",
    layout=KVLayout(
        model="m",
        dtype="float32",
        block_size=1,
        first_layer=0,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
    ),
    num_blocks=1,
    max_model_len=10,
    max_num_seqs=1,
    vocab_size=10,
    num_threads=1,
    device="cpu",
    pid=1,
)


@pytest.fixture
async def served():
    server = WorkerServer()
    port = server.bind("127.0.0.1", 0)
    worker = EchoWorker()
    await server.start(worker, INFO)
    yield server, worker, f"127.0.0.1:{port}"
    await server.stop()


class Router:
    """A client that speaks the raw protocol."""

    def __init__(self, address):
        self.channel = grpc.aio.insecure_channel(address)
        self.call = worker_pb2_grpc.WorkerStub(self.channel).Session()
        self.reports = []

    async def hello(self):
        message = await self.call.read()
        assert message.WhichOneof("message") == "info"
        return message.info

    async def submit(self, request):
        await self.call.write(pb.RouterMessage(submit=pb.Submit(request=request_to_proto(request))))

    async def abort(self, request_id, attempt=0):
        await self.call.write(
            pb.RouterMessage(abort=pb.Abort(request_id=request_id, attempt=attempt))
        )

    async def step(self):
        while True:
            message = await self.call.read()
            if message == grpc.aio.EOF:
                return None
            if message.WhichOneof("message") == "step":
                return [output_from_proto(output) for output in message.step.outputs]
            self.reports.append(report_from_proto(message.report))

    async def collect(self, *request_ids):
        """Tokens of these requests until each has ended."""
        tokens = {request_id: [] for request_id in request_ids}
        live = set(request_ids)
        while live:
            for output in await self.step():
                tokens[output.request_id] += output.token_ids
                if output.finish_reason:
                    live.discard(output.request_id)
        return tokens

    async def close(self):
        self.call.cancel()
        await self.channel.close()


@pytest.fixture
async def router(served):
    router = Router(served[2])
    yield router
    await router.close()


async def eventually(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_info_comes_first_and_outputs_follow(router, make_request):
    assert (await router.hello()).name == "w"
    await router.submit(make_request([1, 2, 3], request_id="a"))
    await router.submit(make_request([4, 5], request_id="b"))
    assert await router.collect("a", "b") == {"a": [1, 2, 3], "b": [4, 5]}


async def test_refused_request_gets_its_error_and_the_stream_goes_on(router, make_request):
    await router.hello()
    await router.submit(make_request(range(101), request_id="long"))
    [output] = await router.step()
    assert isinstance(output.error, ContextLengthError)
    assert (output.error.message, output.error.param) == ("too long", "prompt")
    await router.submit(make_request([1], request_id="a"))
    assert await router.collect("a") == {"a": [1]}


async def test_malformed_request_is_refused_alone(router, make_request):
    await router.hello()
    bad = request_to_proto(make_request([1], request_id="bad"))
    bad.sampling.top_p = 7
    await router.call.write(pb.RouterMessage(submit=pb.Submit(request=bad)))
    [output] = await router.step()
    assert output.error is not None
    assert output.error.param == "top_p"


async def test_routers_see_only_their_own_sequences(served, router, make_request):
    other = Router(served[2])
    await asyncio.gather(router.hello(), other.hello())
    await router.submit(make_request([1] * 50, request_id="a"))
    await other.submit(make_request([2] * 50, request_id="b"))
    mine, theirs = await asyncio.gather(router.collect("a"), other.collect("b"))
    assert (mine, theirs) == ({"a": [1] * 50}, {"b": [2] * 50})
    await other.close()


async def test_broken_stream_aborts_its_requests_and_no_others(served, router, make_request):
    _, worker, address = served
    other = Router(address)
    await asyncio.gather(router.hello(), other.hello())
    endless = make_request(range(100), request_id="gone")
    worker.step = lambda: StepResult([], worked=False)  # hold everything where it is
    await router.submit(make_request([1], request_id="stays"))
    await other.submit(endless)
    await eventually(lambda: len(worker.live) == 2)
    await other.close()
    await eventually(lambda: worker.aborted == [("gone", 0)])
    assert list(worker.live) == [("stays", 0)]


async def test_abort_stops_the_outputs(served, router, make_request):
    _, worker, _ = served
    await router.hello()
    worker.step = lambda: StepResult([], worked=False)
    await router.submit(make_request([1], request_id="a"))
    await router.abort("a", attempt=1)  # another attempt: fenced off
    await router.abort("unknown")
    await router.abort("a")
    await eventually(lambda: worker.aborted == [("a", 0)])


async def test_ended_and_aborted_requests_leave_nothing_in_the_session(
    served, router, make_request
):
    server, worker, _ = served
    await router.hello()
    await router.submit(make_request([1], request_id="ends"))
    await router.collect("ends")
    worker.step = lambda: StepResult([], worked=False)
    for i in range(20):
        await router.submit(make_request([1], request_id=str(i)))
        await router.abort(str(i))
    await eventually(lambda: len(worker.aborted) == 20)
    [session] = server.hub._sessions
    assert (session.keys, server.hub._owner) == (set(), {})


async def test_an_attempt_that_is_here_already_is_refused_and_the_first_goes_on(
    served, router, make_request
):
    _, worker, address = served
    other = Router(address)
    await asyncio.gather(router.hello(), other.hello())
    step, worker.step = worker.step, lambda: StepResult([], worked=False)
    await router.submit(make_request([1, 2, 3], request_id="a"))
    await eventually(lambda: worker.live)
    await other.submit(make_request([9, 9], request_id="a"))
    [refusal] = await other.step()
    assert isinstance(refusal.error, InvalidRequestError)
    await other.abort("a")  # not its own: ignored
    await other.close()  # nor does its end abort it
    worker.step = step
    assert await router.collect("a") == {"a": [1, 2, 3]}


async def test_an_output_that_does_not_fit_the_wire_fails_alone(served, router, make_request):
    _, worker, _ = served
    await router.hello()
    step = worker.step

    def odd():
        result = step()
        outputs = [
            replace(o, token_ids=(2**40,)) if o.request_id == "odd" else o for o in result.outputs
        ]
        return StepResult(outputs, worked=result.worked)

    worker.step = odd
    await router.submit(make_request([1], request_id="odd"))
    await router.submit(make_request([1, 2, 3], request_id="good"))
    seen = []
    while sum(output.request_id == "good" for output in seen) < 3:
        seen += await router.step()
    [failed] = [output for output in seen if output.request_id == "odd"]
    assert isinstance(failed.error, InternalError)


async def test_another_model_is_refused(router, make_request):
    await router.hello()
    await router.submit(replace(make_request([1], request_id="a"), model="other"))
    [output] = await router.step()
    assert isinstance(output.error, ModelNotFoundError)


async def test_a_failed_start_gives_the_port_back():
    server = WorkerServer()
    port = server.bind("127.0.0.1", 0)
    await server.stop()
    again = WorkerServer()
    assert again.bind("127.0.0.1", port) == port
    await again.stop()


class Opened:
    """Takes until `ready` to open; notes whether the step thread still ran when it was closed."""

    def __init__(self, server, ready):
        self._server = server
        self.was_stepping = None
        assert ready.wait(10)

    def close(self):
        assert self.was_stepping is None, "closed twice"
        self.was_stepping = self._server.step_loop._thread.is_alive()


async def test_what_was_opened_is_closed_once_when_no_step_can_use_it():
    server, ready = WorkerServer(), threading.Event()
    server.bind("127.0.0.1", 0)
    ready.set()
    opened = await server.open(lambda: Opened(server, ready))
    await server.start(EchoWorker(), INFO)
    assert server.step_loop._thread.is_alive()
    await server.stop()
    await server.stop()
    assert opened.was_stepping is False


async def test_what_opens_after_the_start_was_cancelled_is_closed_too():
    server, ready, made = WorkerServer(), threading.Event(), []

    def make():
        made.append(Opened(server, ready))
        return made[0]

    async def start():
        async with server.undone_on_failure():
            server.bind("127.0.0.1", 0)
            await server.open(make)

    starting = asyncio.create_task(start())
    await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.sleep(0.05)
    assert not starting.done()
    ready.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert made[0].was_stepping is False


async def test_what_cannot_be_opened_says_why():
    def make():
        raise ConfigError("3 heads over 2 ranks")

    server = WorkerServer()
    with pytest.raises(ConfigError, match="3 heads over 2 ranks"):
        async with server.undone_on_failure():
            await server.open(make)


async def test_an_end_that_nobody_waits_for_is_no_error(caplog):
    server = WorkerServer()
    server.bind("127.0.0.1", 0)
    server.fail("a rank is gone")
    await asyncio.sleep(0)
    await server.stop()
    del server
    gc.collect()
    assert caplog.text == ""


async def test_first_report_is_a_snapshot_and_numbers_have_no_gap(router, make_request):
    await router.hello()
    for i in range(5):
        await router.submit(make_request([1], request_id=str(i)))
        await router.collect(str(i))
        await asyncio.sleep(0.06)
    numbers = [report.sequence_number for report in router.reports]
    assert router.reports[0].stored == (b"x" * 16,)
    assert all(report.stored == () for report in router.reports[1:])
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) > 3


async def test_a_worker_that_cannot_step_ends_its_streams_and_says_why(served, router):
    server, worker, _ = served
    await router.hello()
    worker.broken = True
    async with asyncio.timeout(5):
        assert await router.step() is None
        with pytest.raises(InternalError, match="broken on purpose"):
            await server.wait()


async def test_a_taken_port_is_a_config_error(served):
    port = int(served[2].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=str(port)):
        WorkerServer().bind("127.0.0.1", port)
