"""Who runs a step: the seam where one batch fans out to several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.config import EngineConfig
from core.kv import KVLayout
from core.model_config import ModelConfig
from core.worker import Progress
from engine.batch import Batch, SequenceResult
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.sequence import Sequence as EngineSequence


class Executor(Protocol):
    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def kv_cache(self) -> KVCache: ...

    @property
    def layout(self) -> KVLayout: ...

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
        self.num_blocks = runner.kv_cache.num_blocks
        self.max_model_len = runner.max_model_len

    def execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        return self._runner.execute(batch)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self.kv_cache.clear_blocks(block_ids)


def clear_spoiled(executor: Executor, sequences: Sequence[EngineSequence]) -> None:
    """What failed sequences have left, before their blocks are given out again."""
    for sequence in sequences:
        if sequence.spoiled_block_ids:
            executor.clear_blocks(sequence.spoiled_block_ids)
            sequence.spoiled_block_ids = []


def longest_sequence(executor: Executor) -> int:
    """Tokens at most: alone it fits into the pool, so preemption never starves a sequence."""
    return min(executor.max_model_len, executor.num_blocks * executor.layout.block_size)
