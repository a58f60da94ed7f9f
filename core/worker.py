"""Who a worker is and how it is doing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from core.errors import ConfigError
from core.kv import KVLayout
from core.prefix import BlockHash

Progress = Callable[[str, float], None]
"""What a starting worker does and how far it is, 0 to 1. May be called from any thread."""


class WorkerRole(StrEnum):
    """A fact of deployment, not of the engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    """Both strokes in one worker. A cluster has either this kind or the other two."""


DISAGGREGATED = (WorkerRole.PREFILL, WorkerRole.DECODE)


def needed_roles(roles: Collection[WorkerRole]) -> tuple[WorkerRole, ...]:
    """Who must be there for a request, in a cluster that has workers of `roles`. Raises ConfigError
    when these mix."""
    if WorkerRole.COLOCATED not in roles:
        return DISAGGREGATED
    others = [role for role in DISAGGREGATED if role in roles]
    if others:
        raise ConfigError(
            f"a cluster has either colocated workers or prefill and decode workers: colocated and "
            f"{' and '.join(others)} do not mix"
        )
    return (WorkerRole.COLOCATED,)


def endpoint(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerId:
    """`incarnation` is random per process start: a restarted worker is someone else."""

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself once, when a router opens its stream."""

    worker_id: WorkerId
    role: WorkerRole
    address: str
    model: str
    """Served model name."""
    layout: KVLayout
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_threads: int
    device: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """Load after a step, plus what the prefix cache gained and lost since the report before.

    `sequence_number` counts reports of one incarnation, so that a gap in stored/evicted hashes is
    seen and the index is cleared for that worker.
    """

    sequence_number: int
    num_waiting: int
    num_running: int
    num_queued_tokens: int
    """Prompt tokens not yet computed."""
    num_free_blocks: int
    """Free or cached: what a new request could get."""
    num_leased_blocks: int
    num_cached_blocks: int
    num_blocks: int
    stored: tuple[BlockHash, ...] = ()
    evicted: tuple[BlockHash, ...] = ()
    rss_bytes: int = 0
