"""Steps of one model on one rank and on two, each rank a process with one thread, and the messages
of such steps with nothing computed between them.

The model is a random Llama of SmolLM2-135M's depth, with 4 kv heads where that has 3, which cannot
be halved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.step_curves import decoding, prefilling
from benchmarks.transfer_ends import HOST, other_process
from core.config import CacheConfig, EngineConfig, ParallelConfig, TransferConfig
from deploy.rank_processes import LocalRanks
from engine.batch import Batch
from engine.executor import Executor, LocalExecutor, open_executor
from engine.model_runner import ModelRunner
from parallel.rendezvous import Meeting, Store, host_store, join_store
from parallel.worker_ranks import Joined, join_ranks

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 30, 512, 49_152
CONTEXT = 128
SHAPES = {
    "tp1": ParallelConfig(),
    "tp1, operators": ParallelConfig(),
    "tp2": ParallelConfig(tensor_parallel_size=2),
    "pp2": ParallelConfig(pipeline_parallel_size=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    name: str
    batch: Batch
    num_tokens: int
    """It computes."""
    num_outputs: int
    num_parts: int
    """In a pipeline of two stages."""


STEPS = (
    Step(
        name="decode 1",
        batch=Batch(sequences=(decoding(0, CONTEXT),)),
        num_tokens=1,
        num_outputs=1,
        num_parts=1,
    ),
    Step(
        name="decode 8",
        batch=Batch(sequences=tuple(decoding(i, CONTEXT) for i in range(8))),
        num_tokens=8,
        num_outputs=8,
        num_parts=1,
    ),
    Step(
        name="prompt 512",
        batch=prefilling(512, 512)[0],
        num_tokens=512,
        num_outputs=1,
        num_parts=2,
    ),
)


def write_model(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def running(model_path: str, shape: str) -> Iterator[Executor]:
    config = EngineConfig(
        model_path=model_path,
        dtype="bfloat16",
        cache=CacheConfig(block_size=16, num_blocks=128),
        parallel=SHAPES[shape],
    )
    executor: Executor
    if shape == "tp1, operators":
        executor = LocalExecutor(_OperatorRunner(config))
    else:
        launch_ranks = partial(LocalRanks, transfer=TransferConfig())
        executor = open_executor(config, host=HOST, launch_ranks=launch_ranks)
    yield executor
    executor.close()


class _OperatorRunner(ModelRunner):
    """One rank as it runs among several: operator by operator, which no setting asks for."""

    def _use_kernels(self) -> None:
        super()._use_kernels()


# -- the messages of a step alone


class StepMessages:
    """This process is rank 0, another one is rank 1; each measure is of one step's messages."""

    def __init__(self, joined: Joined, connection: Connection) -> None:
        self._joined = joined
        self._connection = connection

    def seconds(self, name: str, step: Step, repeats: int) -> list[float]:
        self._connection.send((name, step, repeats))
        return _exchange(self._joined, name, step, repeats)


@contextmanager
def open_messages(shape: ParallelConfig) -> Iterator[StepMessages]:
    store, meeting = host_store(HOST)
    with other_process(_other_rank, meeting, shape) as connection:
        joined = _join(store, 0, shape)
        yield StepMessages(joined, connection)
        connection.send(None)


def _other_rank(connection: Connection, meeting: Meeting, shape: ParallelConfig) -> None:
    joined = _join(join_store(meeting, 30.0), 1, shape)
    while (wanted := connection.recv()) is not None:
        _exchange(joined, *wanted)


def _join(store: Store, rank: int, shape: ParallelConfig) -> Joined:
    return join_ranks(store, rank, shape, hidden_size=HIDDEN_SIZE, dtype=torch.bfloat16, host=HOST)


def _exchange(joined: Joined, name: str, step: Step, repeats: int) -> list[float]:
    """Seconds of each repeat, after one that is not counted; on rank 1 too, for nobody."""
    messages = {"all_reduce": _reduce, "all_gather": _gather, "plan": _plan, "pipeline": _pipeline}
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        messages[name](joined, step)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


NUM_REDUCES = 2 * NUM_LAYERS + 1
"""Two of each layer, one of the embedding."""


def _reduce(joined: Joined, step: Step) -> None:
    hidden = torch.zeros(step.num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
    for _ in range(NUM_REDUCES):
        hidden = joined.rank.group.all_reduce(hidden)


def _gather(joined: Joined, step: Step) -> None:
    logits = torch.zeros(step.num_outputs, VOCAB_SIZE // 2, dtype=torch.bfloat16)
    joined.rank.group.all_gather(logits)


def _plan(joined: Joined, step: Step) -> None:
    """There, and a result back."""
    control = joined.control
    if control.rank == 0:
        control.broadcast(bytes(256))
        control.receive(1)
    else:
        control.receive(0)
        control.send(bytes(64), 0)


def _pipeline(joined: Joined, step: Step) -> None:
    """Plan and hidden states of each part there, the results back."""
    control, link = joined.control, joined.rank.link
    assert link is not None
    num_tokens = step.num_tokens // step.num_parts
    for _ in range(step.num_parts):
        if control.rank == 0:
            control.broadcast(bytes(256))
            link.send(torch.zeros(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16))
        else:
            control.receive(0)
            link.receive(num_tokens)
            control.send(bytes(64), 0)
    if control.rank == 0:
        for _ in range(step.num_parts):
            control.receive(1)
