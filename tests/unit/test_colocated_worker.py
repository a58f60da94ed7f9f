"""ColocatedWorker over the token executor, alone and behind an InProcessClient.

The engine's own tests know schedulers and pools; here is what the front end adds: attempts, times,
failures, and the way to a router in the same process.
"""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_workers.worker import ColocatedWorker
from core.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    StepFailedError,
    WorkerLostError,
    WorkerUnavailableError,
)
from core.request import FinishReason
from core.worker import WorkerId, WorkerInfo, WorkerRole
from protocol.worker_server import WorkerServer
from router.in_process_client import InProcessClient


@pytest.fixture(scope="session")
def make_worker(token_executor, engine_config):
    def make(num_blocks=32, block_size=4, max_model_len=100, **config):
        executor = token_executor(num_blocks, block_size, max_model_len)
        asked = engine_config(num_blocks=num_blocks, block_size=block_size, **config)
        return ColocatedWorker(asked, executor, time.monotonic), executor

    return make


def run(worker, outputs=None, num_steps=500):
    """Step until nothing is left; all outputs in order."""
    outputs = [] if outputs is None else outputs
    for _ in range(num_steps):
        result = worker.step()
        outputs += result.outputs
        worker.engine.pool.check()
        if not result.worked:
            return outputs
    raise AssertionError("it never comes to rest")


def is_empty(worker):
    _, _, *held = worker.engine.pool.check()
    return not any(held) and not worker._lives and not worker._reading


def test_a_request_lives_from_prompt_to_last_token(make_worker, make_request, expected_tokens):
    worker, _ = make_worker()
    worker.submit(make_request(range(20), max_tokens=6, ignore_eos=True), None)
    assert worker.report().num_queued_tokens == 20
    worker.step()
    report = worker.report()
    assert (report.num_running, report.num_waiting, report.num_queued_tokens) == (1, 0, 4)
    first, *middle, last = run(worker)
    tokens = [token for output in (first, *middle, last) for token in output.token_ids]
    assert tuple(tokens) == expected_tokens(tuple(range(20)), 6)
    times = first.prefill_times
    assert (times.num_prompt_tokens, times.num_cached_tokens, times.num_steps) == (20, 0, 2)
    assert all(output.prefill_times is output.decode_times is None for output in middle)
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.prefill_times, last.decode_times.num_steps) == (None, 5)
    assert is_empty(worker)


def test_a_single_token_has_a_prefill_only(make_worker, make_request):
    worker, _ = make_worker()
    worker.submit(make_request([1, 2], max_tokens=1), None)
    [output] = run(worker)
    assert output.prefill_times.num_steps == 1
    assert (output.decode_times, output.finish_reason) == (None, FinishReason.LENGTH)
    assert is_empty(worker)


def test_a_later_attempt_ends_the_earlier_one(make_worker, make_request, expected_tokens):
    """The router had lost us; its abort is still on the way, or never comes."""
    worker, _ = make_worker()
    worker.submit(make_request([1, 2], max_tokens=9, ignore_eos=True), None)
    worker.step()
    said = expected_tokens((1, 2), 1)
    worker.submit(make_request([1, 2], attempt=1, output=said, max_tokens=9, ignore_eos=True), None)
    worker.abort("r", 0)
    outputs = run(worker)
    assert {output.attempt for output in outputs} == {1}
    tokens = tuple(token for output in outputs for token in output.token_ids)
    assert said + tokens == expected_tokens((1, 2), 9)
    assert is_empty(worker)


def test_refusals_leave_nothing(make_worker, make_request):
    worker, _ = make_worker(max_model_len=10)
    worker.submit(make_request([1]), None)
    refused = {
        InvalidRequestError: [make_request([1]), make_request([2], request_id="n", num_choices=2)],
        ContextLengthError: [make_request(range(10), request_id="long")],
    }
    for kind, requests in refused.items():
        for request in requests:
            with pytest.raises(kind):
                worker.submit(request, None)
    run(worker)
    assert is_empty(worker)


def test_a_failed_step_ends_those_in_it_and_no_others(make_worker, make_request, expected_tokens):
    worker, executor = make_worker(max_num_seqs=1)
    execute, broken = executor.execute, [True]

    def fail_once(batch):
        if broken:
            broken.clear()
            raise RuntimeError("out of memory")
        return execute(batch)

    worker.submit(make_request([1], request_id="a"), None)
    worker.submit(make_request([2], request_id="b"), None)
    executor.execute = fail_once
    outputs = run(worker)
    assert outputs[0].request_id == "a"
    assert isinstance(outputs[0].error, StepFailedError)
    tokens = tuple(token for output in outputs[1:] for token in output.token_ids)
    assert tokens == expected_tokens((2,), 8)
    assert is_empty(worker)


def test_a_bug_outside_the_model_ends_the_worker(make_worker, make_request):
    worker, _ = make_worker()
    worker.submit(make_request([1]), None)
    worker.engine._decode.schedule = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        worker.step()


@settings(deadline=None, max_examples=40)
@given(
    storm=st.lists(
        st.tuples(st.sampled_from(["submit", "abort", "step"]), st.integers(0, 7)), max_size=60
    )
)
def test_any_storm_leaves_right_tokens_and_no_blocks(
    make_worker, make_request, expected_tokens, storm
):
    worker, _ = make_worker(num_blocks=12)
    asked, outputs, aborted = {}, [], set()
    for action, index in storm:
        if action == "step":
            outputs += worker.step().outputs
        elif action == "abort":
            worker.abort(f"r{index}", 0)
            aborted.add(f"r{index}")
        elif f"r{index}" not in asked:
            prompt = tuple(range(index + 1)) * 2
            asked[f"r{index}"] = prompt
            worker.submit(
                make_request(prompt, request_id=f"r{index}", max_tokens=12, ignore_eos=True), None
            )
    run(worker, outputs)
    for request_id, prompt in asked.items():
        own = [output for output in outputs if output.request_id == request_id]
        tokens = tuple(token for output in own for token in output.token_ids)
        assert tokens == expected_tokens(prompt, 12)[: len(tokens)]
        assert request_id in aborted or own[-1].finish_reason is FinishReason.LENGTH
    assert is_empty(worker)


class Listener:
    def __init__(self):
        self.reports, self.lost = [], []

    def worker_reported(self, info, report):
        self.reports.append(report)

    def worker_lost(self, info):
        self.lost.append(info.worker_id)


@pytest.fixture
async def served(make_worker):
    """(server, worker, connected client, its listener)"""
    worker, executor = make_worker(num_blocks=300, max_model_len=1000)
    server, listener = WorkerServer(), Listener()
    port = server.bind("127.0.0.1", 0)
    info = WorkerInfo(
        worker_id=WorkerId(name="w", incarnation="i"), role=WorkerRole.COLOCATED,
        address=f"127.0.0.1:{port}", model="m", layout=executor.layout, num_blocks=300,
        max_model_len=1000, max_num_seqs=8, vocab_size=50, num_threads=1, device="cpu", pid=1,
    )  # fmt: skip
    await server.start(worker, info)
    client = InProcessClient(server.hub, listener)
    client.start()
    yield server, worker, client, listener
    await client.close()
    await server.stop()
    assert is_empty(worker)
    assert (server.hub._sessions, server.hub._owner) == (set(), {})


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_in_process_streams_get_their_own_outputs(served, make_request, expected_tokens):
    server, _, client, listener = served
    assert client.info is server.hub.info

    async def ask(index):
        request = make_request([index], request_id=f"r{index}", max_tokens=30, ignore_eos=True)
        with client.submit(request) as outputs:
            return tuple([token async for output in outputs for token in output.token_ids])

    answers = await asyncio.gather(*(ask(index) for index in range(20)))
    assert answers == [expected_tokens((index,), 30) for index in range(20)]
    assert (len(client.streams), client.streams.num_unknown_outputs) == (0, 0)
    await until(lambda: client.report is not None and client.report.num_cached_blocks > 0)
    assert any(report.stored for report in listener.reports)


async def test_one_call_brings_all_outputs_of_a_step(served, make_request):
    _, _, client, _ = served
    batches, take = [], client.take_outputs

    def watch(outputs):
        batches.append(len(outputs))
        take(outputs)

    client.take_outputs = watch

    async def ask(index):
        with client.submit(
            make_request([index], request_id=f"r{index}", max_tokens=50, ignore_eos=True)
        ) as outputs:
            return [output async for output in outputs]

    await asyncio.gather(*(ask(index) for index in range(8)))
    assert sum(batches) == 8 * 50
    assert max(batches) == 8


async def test_in_process_refusal_and_deadline(served, make_request):
    _, worker, client, _ = served
    with (
        client.submit(make_request([99], request_id="bad")) as outputs,
        pytest.raises(InvalidRequestError),
    ):
        await anext(outputs)
    endless = make_request([1], max_tokens=900, ignore_eos=True)
    with (
        client.submit(endless, timeout_s=0.02) as outputs,
        pytest.raises(DeadlineExceededError),
    ):
        async for _ in outputs:
            pass
    await until(lambda: not worker._lives)


async def test_leaving_an_in_process_stream_aborts_it(served, make_request):
    _, worker, client, _ = served
    with client.submit(make_request([1], max_tokens=900, ignore_eos=True)) as outputs:
        await anext(outputs)
        assert worker._lives
    await until(lambda: not worker._lives)
    assert len(client.streams) == 0


async def test_in_process_streams_end_with_their_worker(served, make_request):
    server, worker, client, listener = served
    with client.submit(make_request([1], max_tokens=900, ignore_eos=True)) as outputs:
        await anext(outputs)
        server.step_loop.post(lambda: 1 / 0)
        with pytest.raises(WorkerLostError):
            async for _ in outputs:
                pass
    assert listener.lost == [server.hub.info.worker_id]
    assert client.info is None
    with pytest.raises(WorkerUnavailableError):
        client.submit(make_request([1]))
    worker.abort("r", 0)  # its thread is gone
    with pytest.raises(Exception, match="the step loop died"):
        await server.wait()


async def test_closing_an_in_process_client_ends_its_streams(served, make_request):
    _, worker, client, listener = served
    with client.submit(make_request([1], max_tokens=900, ignore_eos=True)) as outputs:
        await anext(outputs)
        await client.close()
        with pytest.raises(WorkerUnavailableError, match="out of service"):
            async for _ in outputs:
                pass
    await until(lambda: not worker._lives)
    assert len(listener.lost) == 1
