"""What a worker says of itself: once who it is, then again and again how it is doing."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

import psutil

from core.config import WorkerConfig
from core.worker import WorkerId, WorkerInfo, WorkerReport, endpoint
from engine.block_pool import BlockPool
from engine.executor import Executor, longest_sequence


def describe(config: WorkerConfig, executor: Executor, *, port: int) -> WorkerInfo:
    """A new incarnation of this worker, which listens on `port`."""
    return WorkerInfo(
        worker_id=WorkerId(name=config.name, incarnation=secrets.token_hex(8)),
        role=config.role,
        address=endpoint(config.dialled_host, port),
        model=config.served_model_name,
        layout=executor.layout,
        num_blocks=executor.num_blocks,
        max_model_len=longest_sequence(executor),
        max_num_seqs=config.engine.scheduler.max_num_seqs,
        vocab_size=executor.model_config.vocab_size,
        num_threads=config.engine.num_threads,
        device=config.engine.device,
        pid=os.getpid(),
    )


class Reporter:
    """Turns a pool and a few counts into WorkerReports with gap-free sequence numbers."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._process = psutil.Process()
        self._last = WorkerReport(
            sequence_number=0,
            num_waiting=0,
            num_running=0,
            num_queued_tokens=0,
            num_free_blocks=pool.num_blocks,
            num_leased_blocks=0,
            num_cached_blocks=0,
            num_blocks=pool.num_blocks,
        )

    def report(self, *, num_waiting: int, num_running: int, num_queued_tokens: int) -> WorkerReport:
        """State now, with the cache events since the report before."""
        counts = self._pool.counts()
        events = self._pool.drain_events()
        self._last = WorkerReport(
            sequence_number=self._last.sequence_number + 1,
            num_waiting=num_waiting,
            num_running=num_running,
            num_queued_tokens=num_queued_tokens,
            num_free_blocks=counts.free + counts.cached,
            num_leased_blocks=counts.leased,
            num_cached_blocks=counts.cached,
            num_blocks=self._pool.num_blocks,
            stored=events.stored,
            evicted=events.evicted,
            rss_bytes=self._process.memory_info().rss,
        )
        return self._last

    def snapshot(self) -> WorkerReport:
        """The last report once more, with all findable hashes: where a new reader starts."""
        return replace(self._last, stored=self._pool.block_hashes, evicted=())
