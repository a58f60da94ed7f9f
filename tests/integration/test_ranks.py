"""Workers of several ranks, each a process: the tokens of one rank, and an end in good order.

Whatever becomes of one rank, no caller waits for ever and no process is left.
"""

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from colocated_workers.server import ColocatedServer
from core.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    TransferConfig,
    WorkerConfig,
)
from core.errors import ConfigError, InternalError, ModelLoadError, RankLostError
from core.worker import WorkerRole
from deploy.rank_processes import LocalRanks
from engine.batch import Pooling
from engine.beam_search import BeamSearchParams
from engine.executor import LocalExecutor, open_executor
from engine.llm_engine import LLMEngine
from engine.pooling import PoolingRequest
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import output_from_proto, request_to_proto

HOST = "127.0.0.1"
SPOILING = 299
"""A token whose embedding is no number."""
PATIENCE_S = 60
"""Far more than any of it takes; who waits longer hangs."""

local_ranks = partial(LocalRanks, transfer=TransferConfig())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 3 layers and 2 kv heads."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        llama.model.embed_tokens.weight[SPOILING] = torch.nan
        llama.lm_head.weight[SPOILING] = 0.0  # no answer contains it
    llama.save_pretrained(folder)
    return str(folder)


def config_of(model_path, *, tp=1, pp=1, step_timeout_s=30.0, **changes):
    """A pool so small that a few answers preempt each other, steps so short that prompts take
    several, and long enough for several parts in a pipeline."""
    parallel = ParallelConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, step_timeout_s=step_timeout_s
    )
    return EngineConfig(
        model_path=model_path,
        cache=CacheConfig(block_size=4, num_blocks=40),
        scheduler=SchedulerConfig(max_num_batched_tokens=100),
        parallel=parallel,
        **changes,
    )


def children():
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def new_processes():
    """Those that have come since the test began and still are."""
    before = children()
    return lambda: children() - before


@contextmanager
def opened(config, **options):
    """(engine, processes of the other ranks); asserts that these end."""
    before = children()
    executor = open_executor(config, host=HOST, launch_ranks=local_ranks, **options)
    ranks = sorted(children() - before, key=lambda process: process.pid)
    try:
        yield LLMEngine(config, executor), ranks
    finally:
        executor.close()
        executor.close()  # as often as one likes
        assert not any(process.is_running() for process in ranks)
    assert len(ranks) == config.parallel.world_size - 1


@pytest.fixture(scope="module")
def alone(model):
    config = config_of(model)
    return LLMEngine(config, LocalExecutor.from_config(config))


SHAPES = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "pp3": {"pp": 3},
    "tp2pp2 in torch": {"tp": 2, "pp": 2, "kernels": "torch"},
}


@pytest.fixture(scope="module", params=SHAPES)
def together(request, model):
    """The engine over several ranks."""
    with opened(config_of(model, **SHAPES[request.param])) as (engine, _):
        yield engine


@pytest.fixture
def both(alone, together):
    """Ask either engine; both must be empty afterwards."""

    def ask(question):
        answers = question(alone), question(together)
        for engine in (alone, together):
            assert not engine.has_unfinished_requests
            assert engine.pool.check().owned == 0
        return answers

    return ask


def prompt(length, first=0):
    return [(first + 7 * i) % 290 for i in range(length)]


PROMPTS = [prompt(length, first) for first, length in enumerate((1, 4, 17, 40, 75))]


def tokens(chunks):
    return [chunk.token_ids for chunk in chunks]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.9, "seed": 11, "top_p": 0.9}, {"repetition_penalty": 1.3}],
    ids=["greedy", "sampled", "penalized"],
)
def test_tokens_are_those_of_one_rank(both, make_request, sampling):
    def question(engine):
        return engine.generate(
            [
                make_request(ids, request_id=f"{i}", max_tokens=12, ignore_eos=True, **sampling)
                for i, ids in enumerate(PROMPTS)
            ]
        )

    expected, got = map(tokens, both(question))
    assert got == expected
    assert len(set(got)) == len(PROMPTS)


def test_log_probabilities_of_answer_and_prompt(both, make_request):
    request = make_request(prompt(70), max_tokens=6, logprobs=3, prompt_logprobs=2)
    [expected], [got] = both(lambda engine: engine.generate([request]))
    assert len(got.prompt_logprobs) == 69
    for theirs, mine in (
        (expected.prompt_logprobs, got.prompt_logprobs),
        (expected.logprobs, got.logprobs),
    ):
        assert [item.token_id for item in mine] == [item.token_id for item in theirs]
        flat = [[value for _, value in item.top] + [item.logprob] for item in mine]
        reference = [[value for _, value in item.top] + [item.logprob] for item in theirs]
        torch.testing.assert_close(
            torch.tensor(flat), torch.tensor(reference), atol=1e-4, rtol=1e-4
        )


def test_choices_share_a_prompt_and_copy_its_last_block(both, make_request):
    copies = []

    def question(engine):
        execute = engine._executor.execute

        def watch(batch):
            copies.append(len(batch.block_copies))
            return execute(batch)

        engine._executor.execute = watch
        try:
            request = make_request(
                prompt(18), max_tokens=10, num_choices=3, temperature=1.0, seed=3
            )
            return engine.generate([request])
        finally:
            del engine._executor.execute

    expected, got = map(tokens, both(question))
    assert got == expected
    assert len(set(got)) == 3
    assert sum(copies) == 4  # two on either side: the third choice keeps the block


def test_beam_search(both, make_request):
    request = make_request(prompt(10), max_tokens=8, num_choices=3)
    params = BeamSearchParams(beam_width=3)
    expected, got = both(lambda engine: engine.beam_search(request, params))
    assert tokens(got) == tokens(expected)
    assert [one.score for one in got] == pytest.approx([one.score for one in expected], abs=1e-3)


def test_answers_that_preempt_each_other(both, make_request):
    requests = [
        make_request(prompt(20, 3 * i), request_id=f"{i}", max_tokens=40, ignore_eos=True)
        for i in range(5)
    ]
    preemptions = []

    def question(engine):
        before = engine.kv_usage.num_preemptions
        chunks = engine.generate(requests)
        preemptions.append(engine.kv_usage.num_preemptions - before)
        return chunks

    expected, got = map(tokens, both(question))
    assert got == expected
    assert preemptions[0] == preemptions[1] > 0


def test_what_is_no_number_fails_alone_and_leaves_nothing_behind(both, make_request):
    """Its blocks go to others, who do not attend to all of them."""
    bad = make_request([5, 6, SPOILING, *prompt(100)], request_id="bad")
    good = make_request(prompt(9), request_id="good", max_tokens=12, ignore_eos=True)

    def question(engine):
        said = defaultdict(list)
        engine.add_request(bad)
        engine.add_request(good)
        while engine.has_unfinished_requests:
            for output in engine.step():
                said[output.request_id].append(output.error or output.chunk.token_ids)
        later = [  # together more than the pool; each fills its last block by degrees
            make_request(prompt(13, 5 * i), request_id=f"{i}", max_tokens=3, ignore_eos=True)
            for i in range(12)
        ]
        return said["good"], [type(end) for end in said["bad"]], tokens(engine.generate(later))

    expected, got = both(question)
    assert got == expected
    assert issubclass(got[1][-1], Exception)


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_vectors(both, pooling):
    requests = [
        PoolingRequest(request_id=f"{i}", token_ids=tuple(ids), pooling=pooling)
        for i, ids in enumerate(PROMPTS)
    ]
    expected, got = both(lambda engine: engine.pool_all(requests))
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), atol=1e-3, rtol=1e-3)


# How ranks end.


class Death:
    """An `on_death` that can be waited for."""

    def __init__(self):
        self._told = threading.Event()
        self.reasons = []

    def __call__(self, reason):
        self.reasons.append(reason)
        self._told.set()

    def wait(self):
        assert self._told.wait(PATIENCE_S)
        return self.reasons[0]


def test_a_rank_that_dies_while_idle_is_told_of(model, make_request):
    death = Death()
    with opened(config_of(model, tp=2), on_death=death) as (engine, [rank]):
        assert engine.generate([make_request([1, 2, 3])])
        assert death.reasons == []
        rank.kill()
        assert death.wait() == "rank 1 of the worker ended with exit code -9"
        with pytest.raises(RankLostError):
            engine.generate([make_request([1, 2, 3])])
        assert not engine.has_unfinished_requests


def test_ranks_that_are_told_to_end_are_no_dead_ones(model):
    death = Death()
    with opened(config_of(model, pp=2), on_death=death):
        pass
    assert death.reasons == []


@contextmanager
def in_the_middle_of_a_run(engine, make_request):
    """Yields the running call's future."""
    request = make_request(prompt(9), max_tokens=100, ignore_eos=True)
    under_way = threading.Event()

    def run():
        while True:
            engine.add_request(request)
            while engine.has_unfinished_requests:
                engine.step()
                under_way.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        assert under_way.wait(PATIENCE_S)
        yield running


@pytest.mark.parametrize(
    ("how", "shape", "victim"),
    [
        (signal.SIGKILL, {"tp": 2}, 1),
        (signal.SIGKILL, {"pp": 3}, 1),
        (signal.SIGKILL, {"tp": 2, "pp": 2}, 3),
        (signal.SIGSTOP, {"tp": 2}, 1),
        (signal.SIGSTOP, {"pp": 3}, 2),
    ],
)
def test_a_rank_lost_in_the_middle_of_a_run_ends_it(model, make_request, how, shape, victim):
    # So short only for what is frozen: a machine that is busy must not look so.
    timeout_s = 4.0 if how is signal.SIGSTOP else 1000.0
    with (
        opened(config_of(model, step_timeout_s=timeout_s, **shape)) as (engine, ranks),
        in_the_middle_of_a_run(engine, make_request) as running,
    ):
        ranks[victim - 1].send_signal(how)
        with pytest.raises(RankLostError, match=r"a rank of the worker|pipeline stage"):
            running.result(PATIENCE_S)
        assert not any(process.is_running() for process in ranks)


def test_rank_0_that_fails_in_a_step_does_not_leave_others_in_a_collective(model, make_request):
    with opened(config_of(model, tp=2, step_timeout_s=1000.0)) as (engine, [rank]):
        copy_blocks = engine._executor.kv_cache.copy_blocks

        def fail(copies):
            raise RuntimeError("out of memory")

        engine._executor.kv_cache.copy_blocks = fail  # before its own first collective
        with pytest.raises(RankLostError, match="rank 0 failed in a step: RuntimeError"):
            engine.generate([make_request([1, 2, 3])])
        assert not rank.is_running()
        engine._executor.kv_cache.copy_blocks = copy_blocks
        with pytest.raises(RankLostError):
            engine.generate([make_request([1, 2, 3])])


RANK_0 = """
import sys
from core.config import EngineConfig, ParallelConfig, TransferConfig
from deploy.rank_processes import LocalRanks
from engine.executor import open_executor

def launch(*arguments):
    ranks = LocalRanks(*arguments, TransferConfig())
    print("started", flush=True)
    return ranks

if __name__ == "__main__":
    config = EngineConfig(
        model_path=sys.argv[1], parallel=ParallelConfig(pipeline_parallel_size=3)
    )
    executor = open_executor(config, host="127.0.0.1", launch_ranks=launch)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["started", "ready"])
def test_ranks_do_not_outlive_rank_0(model, when):
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_0, model],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        for line in process.stdout:
            if line.strip() == when:
                break
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
    assert psutil.wait_procs(ranks, PATIENCE_S)[1] == []


def test_a_frozen_rank_does_not_keep_the_others_from_ending(model, monkeypatch):
    monkeypatch.setattr("engine.distributed_executor.STOP_S", 0.5)
    with opened(config_of(model, pp=3)) as (_, ranks):
        ranks[0].suspend()


# What cannot be started.


def without_norms(folder):
    """As if the copy of one rank's machine had been cut short."""
    file = folder / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if "norm" not in name}
    save_file(weights, file, metadata={"format": "pt"})


def without_config(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "kind", "reason"),
    [(without_norms, ModelLoadError, "norm"), (without_config, ConfigError, "rank 1 .*config")],
)
def test_what_one_rank_cannot_load_is_the_workers_reason(
    model, tmp_path, new_processes, spoil, kind, reason
):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    spoil(other)

    def launch(config, *arguments):
        return local_ranks(replace(config, model_path=str(other)), *arguments)

    with pytest.raises(kind, match=reason):
        open_executor(config_of(model, tp=2), host=HOST, launch_ranks=launch)
    assert new_processes() == set()


def launch_nothing(*arguments):
    raise AssertionError("started")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"tp": 3}, "4 attention heads cannot be split over 3 tensor-parallel ranks"),
        ({"pp": 4}, "3 layers cannot be split into 4 pipeline stages"),
    ],
)
def test_a_shape_that_the_model_does_not_have(model, shape, reason):
    with pytest.raises(ConfigError, match=reason):
        open_executor(config_of(model, **shape), host=HOST, launch_ranks=launch_nothing)


def test_a_model_that_is_not_there_starts_nothing(tmp_path):
    with pytest.raises(ConfigError):
        open_executor(config_of(str(tmp_path), tp=2), host=HOST, launch_ranks=launch_nothing)


def test_a_host_that_is_not_ours_starts_nothing(model):
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 for other ranks"):
        open_executor(config_of(model, tp=2), host="192.0.2.1", launch_ranks=launch_nothing)


@pytest.fixture
def launch_dying(new_processes):
    """The ranks die while rank 0 waits for them."""

    def launch(*arguments):
        ranks = local_ranks(*arguments)
        for process in new_processes():
            process.kill()
        return ranks

    return launch


def test_a_rank_that_dies_before_it_is_there_ends_the_start(model, new_processes, launch_dying):
    with pytest.raises(RankLostError, match=r"rank [12] of the worker ended with exit code -9"):
        open_executor(config_of(model, pp=3), host=HOST, launch_ranks=launch_dying)
    assert new_processes() == set()


def test_sockets_and_threads_come_back(model, make_request):
    def held():
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(list(Path("/proc/self/fd").iterdir()))

    def use():
        with opened(config_of(model, tp=2)) as (engine, _):
            engine.generate([make_request([1, 2, 3])])

    use()  # what the first use starts for good
    before = held()
    use()
    assert held() == before


# Served.


@pytest.fixture
async def served(model, new_processes):
    server = ColocatedServer(
        WorkerConfig(
            name="w",
            role=WorkerRole.COLOCATED,
            served_model_name="m",
            engine=config_of(model, tp=2),
        ),
        launch_ranks=local_ranks,
    )
    info = await server.start()
    async with grpc.aio.insecure_channel(info.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        hello = pb.RouterMessage(hello=pb.Hello(router_id="r"))
        await call.write(hello)
        yield server, call
        call.cancel()
    await server.stop()
    assert new_processes() == set()


async def generate(call, request):
    """Its tokens; None when the stream ends before they do."""
    await call.write(pb.RouterMessage(submit=pb.Submit(request=request_to_proto(request))))
    said = []
    while (message := await call.read()) != grpc.aio.EOF:
        for output in message.step.outputs:
            said += output_from_proto(output).token_ids
            if output.finish_reason:
                return tuple(said)
    return None


async def test_a_served_worker_answers_and_ends_when_a_rank_dies(
    served, alone, new_processes, make_request
):
    server, call = served
    request = make_request(prompt(40), max_tokens=20, ignore_eos=True)
    [expected] = tokens(alone.generate([request]))
    assert await generate(call, request) == expected
    [rank] = new_processes()
    waiting = asyncio.create_task(server.wait())
    rank.kill()
    with pytest.raises(InternalError, match="rank"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while await call.read() != grpc.aio.EOF:
            pass


async def test_a_served_worker_whose_rank_dies_under_a_request_ends(
    served, new_processes, make_request
):
    server, call = served
    long = make_request(prompt(9), max_tokens=140, ignore_eos=True)
    running = asyncio.create_task(generate(call, long))
    while server.worker.engine.kv_usage.num_sequences == 0:
        await asyncio.sleep(0.01)
    [rank] = new_processes()
    rank.send_signal(signal.SIGKILL)
    with pytest.raises(InternalError, match="rank"):
        await asyncio.wait_for(server.wait(), PATIENCE_S)
    await asyncio.wait_for(running, PATIENCE_S)


async def test_a_start_that_fails_leaves_nothing(model, new_processes, launch_dying, caplog):
    config = WorkerConfig(
        name="w",
        role=WorkerRole.COLOCATED,
        served_model_name="m",
        engine=config_of(model, tp=2),
    )
    with pytest.raises(RankLostError, match="ended with exit code -9"):
        await ColocatedServer(config, launch_ranks=launch_dying).start()
    await asyncio.sleep(0)
    gc.collect()
    assert new_processes() == set()
    assert "never retrieved" not in caplog.text
