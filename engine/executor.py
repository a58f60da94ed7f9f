"""Who runs a step: the seam where one batch fans out to several ranks."""

from __future__ import annotations

from typing import Protocol

from core.kv import KVLayout
from core.model_config import ModelConfig
from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner


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

    def execute(self, batch: Batch) -> tuple[int | None, ...]:
        """One token per sequence of the batch that wants one, in order; None where it failed."""
        ...


class LocalExecutor:
    """One rank, in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.model_config = runner.model_config
        self.kv_cache = runner.kv_cache
        self.layout = runner.kv_cache.layout
        self.num_blocks = runner.kv_cache.num_blocks
        self.max_model_len = runner.max_model_len

    def execute(self, batch: Batch) -> tuple[int | None, ...]:
        return self._runner.execute(batch)


def longest_sequence(executor: Executor) -> int:
    """Tokens at most: alone it fits into the pool, so preemption never starves a sequence."""
    return min(executor.max_model_len, executor.num_blocks * executor.layout.block_size)
