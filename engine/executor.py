"""Who runs a step: the seam where one batch fans out to several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.config import EngineConfig
from core.errors import ConfigError
from core.kv import KVLayout
from core.model_config import ModelConfig
from core.worker import Progress
from engine.batch import Batch, SequenceResult
from engine.distributed_executor import DistributedExecutor, LaunchRanks
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.sequence import Sequence as EngineSequence


class Executor(Protocol):
    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def kv_cache(self) -> KVCache: ...

    @property
    def layout(self) -> KVLayout:
        """Of this process's rank."""
        ...

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """Of all ranks."""
        ...

    @property
    def rank_addresses(self) -> tuple[str, ...]:
        """Where the other ranks serve their KV (engine/distributed_executor.RankService)."""
        ...

    @property
    def rank_token(self) -> str:
        """What they ask to be shown."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        """One result per sequence of the batch, in order. Needs at least one sequence."""
        ...

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks now. Nobody may own them."""
        ...

    def close(self) -> None:
        """No more steps: other ranks end. Idempotent."""
        ...


class LocalExecutor:
    """One rank, in this process."""

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> LocalExecutor:
        """With the model loaded. Raises ConfigError."""
        return cls(ModelRunner(config, progress=progress))

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.model_config = runner.model_config
        self.kv_cache = runner.kv_cache
        self.layout = runner.kv_cache.layout
        self.layouts = (self.layout,)
        self.rank_addresses: tuple[str, ...] = ()
        self.rank_token = ""
        self.num_blocks = runner.kv_cache.num_blocks
        self.max_model_len = runner.max_model_len

    def execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        return self._runner.execute(batch)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self.kv_cache.clear_blocks(block_ids)

    def close(self) -> None:
        pass


def open_executor(
    config: EngineConfig,
    *,
    host: str,
    launch_ranks: LaunchRanks | None = None,
    on_death: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Executor:
    """All ranks of the worker, loaded; this process is rank 0. `host`: where the others reach it.
    `on_death` is told, from any thread, when one of them has died. Raises ConfigError, and
    RankLostError when they do not come up."""
    if config.parallel.world_size == 1:
        return LocalExecutor.from_config(config, progress)
    if launch_ranks is None:
        raise ConfigError("a worker of several ranks needs somebody to start them")
    return DistributedExecutor.launch(
        config, host=host, launch_ranks=launch_ranks, on_death=on_death, progress=progress
    )


def clear_spoiled(executor: Executor, sequences: Sequence[EngineSequence]) -> None:
    """What failed sequences have left, before their blocks are given out again."""
    for sequence in sequences:
        if sequence.spoiled_block_ids:
            executor.clear_blocks(sequence.spoiled_block_ids)
            sequence.spoiled_block_ids = []


def longest_sequence(executor: Executor) -> int:
    """Tokens at most: alone it fits into the pool, so preemption never starves a sequence."""
    return min(executor.max_model_len, executor.num_blocks * executor.layout.block_size)
