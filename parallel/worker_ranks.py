"""How the ranks of one worker find each other and become groups.

Rank 0 hosts the store. World ranks count stage by stage: rank = pp_rank * tensor_parallel_size +
tp_rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public

from core.config import ParallelConfig
from core.errors import ConfigError, RankLostError
from parallel.collectives import gloo_group
from parallel.control import ControlChannel
from parallel.groups import Group, PipelineStage, Rank, SingleRank, StageLink
from parallel.pipeline import PipelineLink
from parallel.rendezvous import Store, gloo_backend, rank_lost

POLL_S = 0.05
_COMES = "comes"


class Joined(NamedTuple):
    rank: Rank
    control: ControlChannel


def announce(store: Store, rank: int, fault: str = _COMES) -> None:
    """Tell rank 0 that this rank will join now, or why it never will."""
    store.set(_key(rank), fault)


def await_ranks(
    store: Store, size: int, timeout_s: float, failure: Callable[[], str | None]
) -> None:
    """Until all ranks are announced. Raises ConfigError for what a rank says of itself, and
    RankLostError when time runs out, or when `failure` says why one will never come."""
    deadline = time.monotonic() + timeout_s
    waiting = set(range(1, size))
    while waiting:
        ended = failure()  # before the store: who says why it ends does so first
        for rank in sorted(waiting):
            if store.check([_key(rank)]):
                if (said := store.get(_key(rank)).decode()) != _COMES:
                    raise ConfigError(f"rank {rank} cannot start: {said}")
                waiting.discard(rank)
        if waiting and ended is not None:
            raise RankLostError(ended)
        if waiting and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(waiting)))
            raise RankLostError(f"of {size} ranks {names} did not come within {timeout_s:g} s")
        time.sleep(POLL_S if waiting else 0)


def _key(rank: int) -> str:
    return f"rank {rank}"


def join_ranks(
    store: Store,
    world_rank: int,
    shape: ParallelConfig,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    host: str,
) -> Joined:
    """Blocks until all ranks have joined. `host`: of this rank's own sockets. Raises
    RankLostError."""
    pp_rank, tp_rank = divmod(world_rank, shape.tensor_parallel_size)
    stage = PipelineStage(index=pp_rank, count=shape.pipeline_parallel_size)
    timeout_s = shape.step_timeout_s
    control_store, tp_store, pp_store = (
        PrefixStore(name, store) for name in ("control", f"tp {pp_rank}", f"pp {tp_rank}")
    )
    group: Group = SingleRank()
    link: StageLink | None = None
    try:
        control = gloo_backend(
            control_store, world_rank, shape.world_size, host=host, timeout_s=timeout_s
        )
        if shape.tensor_parallel_size > 1:
            group = gloo_group(tp_store, tp_rank, shape.tensor_parallel_size, timeout_s, host=host)
        if stage.count > 1:
            link = PipelineLink.join(
                pp_store,
                pp_rank,
                stage.count,
                hidden_size=hidden_size,
                dtype=dtype,
                host=host,
                timeout_s=timeout_s,
            )
    except RuntimeError as error:
        raise rank_lost(error) from None
    rank = Rank(group=group, stage=stage, link=link)
    return Joined(rank, ControlChannel(control, timeout_s=timeout_s))
