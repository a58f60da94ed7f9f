"""A worker of several ranks: rank 0 plans and answers, the others follow.

Before each step rank 0 sends every rank the step itself, then runs its own share of it; what the
last stage has sampled comes back. Ranks have no other memory of a step than their KV blocks, so
they are in step as long as they get the same plans. Whatever fails on one of them is therefore the
end of all (RankLostError): a worker whose ranks disagree would give wrong tokens.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from core.config import EngineConfig, ParallelConfig
from core.errors import ConfigError, RankLostError, TwostrokeError
from core.kv import KVLayout
from core.model_files import load_model_config
from core.worker import Progress
from engine.batch import Batch, SequenceResult
from engine.micro_batches import split
from engine.model_runner import ModelRunner
from engine.step_plan import (
    Begin,
    ClearBlocks,
    Ready,
    Stop,
    plan_from_bytes,
    plan_to_bytes,
    ready_from_bytes,
    ready_to_bytes,
    results_from_bytes,
    results_to_bytes,
)
from parallel.control import ControlChannel
from parallel.partition import check_shape
from parallel.rendezvous import Meeting, Store, host_store, join_store, rank_lost
from parallel.worker_ranks import Joined, announce, await_ranks, join_ranks

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
"""Between the start of a rank's process and its word to rank 0."""
STOP_S = 5.0
"""How long the other ranks may take to hear that there are no more steps, and then to end."""


class RankProcesses(Protocol):
    """The processes of ranks 1 and up, each in `follow`."""

    def failure(self) -> str | None:
        """Why one of them has ended, None while all run."""
        ...

    def close(self, grace_s: float) -> None:
        """Returns when all have ended: by themselves within that time, else they are made to.
        Idempotent."""
        ...


class RankService(Protocol):
    """What a rank other than 0 serves beside its steps, in threads of its own: its KV."""

    @property
    def address(self) -> str:
        """host:port, taken already."""
        ...

    def start(self, kv: Tensor, layouts: Sequence[KVLayout], rank: int, token: str) -> None:
        """`layouts` of all ranks of the worker; `kv` is that of `rank`, this one. Whoever does not
        show the token is refused."""
        ...

    def close(self) -> None: ...


LaunchRanks = Callable[[EngineConfig, Meeting, Callable[[str], None]], RankProcesses]
"""Starts them; they find rank 0 at the meeting. The last argument is called, from any thread, when
one has ended that was not told to."""


class DistributedExecutor:
    """An Executor (engine/executor.py) on rank 0."""

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        *,
        host: str,
        launch_ranks: LaunchRanks,
        on_death: Callable[[str], None],
        progress: Progress | None = None,
    ) -> DistributedExecutor:
        """Raises ConfigError, also where another rank cannot load, and RankLostError."""
        read = load_model_config(config.model_path)
        check_shape(read, config.parallel)  # or nothing is started
        try:
            store, meeting = host_store(host)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} for other ranks: {error}") from error
        processes = launch_ranks(config, meeting, on_death)
        try:
            await_ranks(store, config.parallel.world_size, JOIN_TIMEOUT_S, processes.failure)
            joined = _join(store, 0, config, read.hidden_size, host)
            return cls(config, joined, processes, progress)
        except BaseException:
            processes.close(0.0)
            raise

    def __init__(
        self,
        config: EngineConfig,
        joined: Joined,
        processes: RankProcesses,
        progress: Progress | None = None,
    ) -> None:
        self._control = joined.control
        self._processes = processes
        self._closed = False
        self._step_timeout_s = config.parallel.step_timeout_s
        self._max_parts = joined.rank.stage.count
        self._output_rank = output_rank(config.parallel)
        self._runner = ModelRunner(config, rank=joined.rank, progress=progress)
        self.model_config = self._runner.model_config
        self.kv_cache = self._runner.kv_cache
        self.max_model_len = self._runner.max_model_len
        mine = Ready(self.kv_cache.layout, self.kv_cache.num_blocks)
        ranks = range(1, self._control.size)
        others = [ready_from_bytes(self._control.receive(rank)) for rank in ranks]
        self.layout = mine.layout
        self.layouts = tuple(ready.layout for ready in (mine, *others))
        self.rank_addresses = tuple(ready.address for ready in others)
        self.num_blocks = min(ready.num_blocks for ready in (mine, *others))
        self.rank_token = secrets.token_hex(16)
        self._control.broadcast(plan_to_bytes(Begin(self.layouts, self.rank_token)))

    def execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        """Raises RankLostError: then all other ranks have ended, and so must this worker."""
        try:
            return self._execute(batch)
        except Exception as error:
            self._end(0.0)  # in the middle of a step they wait for each other, or for this one
            if isinstance(error, RankLostError):
                raise
            logger.exception("rank 0 failed in a step")
            raise RankLostError(f"rank 0 failed in a step: {type(error).__name__}") from error

    def _execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        micro_batches = split(batch, self._max_parts)
        mine: list[SequenceResult] = []
        for part in micro_batches.parts:
            self._control.broadcast(plan_to_bytes(part, with_sampling=self._output_rank != 0))
            mine += self._runner.execute(part)
        return micro_batches.merge(
            mine if self._output_rank == 0 else self._results_of(micro_batches.parts)
        )

    def _results_of(self, parts: Sequence[Batch]) -> list[SequenceResult]:
        rank, timeout_s = self._output_rank, self._step_timeout_s
        found = [results_from_bytes(self._control.receive(rank, timeout_s)) for _ in parts]
        return [result for results in found for result in results]

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """On all ranks: a transfer that comes next must not be cleared away. Raises
        RankLostError."""
        self._control.broadcast(plan_to_bytes(ClearBlocks(tuple(block_ids))))
        self.kv_cache.clear_blocks(block_ids)
        for rank in range(1, self._control.size):
            self._control.receive(rank, self._step_timeout_s)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._control.broadcast(plan_to_bytes(Stop()))
            self._control.flush(STOP_S)
            self._end(STOP_S)
        except RankLostError:
            self._end(0.0)

    def _end(self, grace_s: float) -> None:
        self._closed = True
        self._processes.close(grace_s)


def follow(
    meeting: Meeting,
    world_rank: int,
    config: EngineConfig,
    make_service: Callable[[], RankService],
    *,
    host: str,
    progress: Progress | None = None,
) -> None:
    """Be that rank of the worker whose rank 0 is at the meeting, until it says that there are no
    more steps. `host`: of this rank's own sockets.

    Raises what kept this rank from loading (rank 0 is told), RankLostError when rank 0 is gone, and
    whatever a step raises: then this process must end, so that rank 0 sees that it is gone.
    """
    try:
        store = join_store(meeting, JOIN_TIMEOUT_S)
    except RuntimeError as error:
        raise rank_lost(error) from None
    try:
        hidden_size = load_model_config(config.model_path).hidden_size
        service = make_service()
    except ConfigError as error:
        announce(store, world_rank, error.message)
        raise
    announce(store, world_rank)
    try:
        joined = _join(store, world_rank, config, hidden_size, host)
        runner = _load(joined, config, service.address, progress)
        _serve(joined.control, runner, service, samples=world_rank == output_rank(config.parallel))
    finally:
        service.close()


def _load(
    joined: Joined, config: EngineConfig, address: str, progress: Progress | None
) -> ModelRunner:
    """And tell rank 0 how it went."""
    control = joined.control
    try:
        runner = ModelRunner(config, rank=joined.rank, progress=progress)
    except TwostrokeError as error:
        control.send(ready_to_bytes(error), 0)
        control.flush()  # rank 0 listens when it has loaded its own part
        raise
    cache = runner.kv_cache
    control.send(ready_to_bytes(Ready(cache.layout, cache.num_blocks, address)), 0)
    return runner


def _serve(
    control: ControlChannel, runner: ModelRunner, service: RankService, *, samples: bool
) -> None:
    """The loop of a rank that follows."""
    cache = runner.kv_cache
    while not isinstance(plan := plan_from_bytes(control.receive(0)), Stop):
        match plan:
            case Begin():
                service.start(cache.tensor, plan.layouts, control.rank, plan.token)
            case ClearBlocks():
                cache.clear_blocks(plan.block_ids)
                control.send(b"", 0)
            case Batch():
                results = runner.execute(plan)
                if samples:
                    control.send(results_to_bytes(results), 0)


def _join(
    store: Store, world_rank: int, config: EngineConfig, hidden_size: int, host: str
) -> Joined:
    return join_ranks(
        store,
        world_rank,
        config.parallel,
        hidden_size=hidden_size,
        dtype=getattr(torch, config.dtype),
        host=host,
    )


def output_rank(shape: ParallelConfig) -> int:
    """The one that samples: the first of the last stage."""
    return (shape.pipeline_parallel_size - 1) * shape.tensor_parallel_size
