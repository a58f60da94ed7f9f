"""What runs inside Ray: one actor per rank, and the detached controller that keeps them running.

Ray places processes and says when one has died; it restarts none of them, because a restarted
worker has another address and nothing of the old one's KV: that is a new launch, decided by
deploy.controller. No token ever passes through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import ClusterConfig, EngineConfig, TransferConfig, WorkerConfig
from core.errors import WorkerLostError
from core.worker import Progress, WorkerInfo
from deploy.logs import configure_logging
from deploy.placement import Bundle, WorkerPlacement, place_worker
from deploy.supervisor import ClusterState, Supervisor
from deploy.workers import make_server
from engine.distributed_executor import follow
from kv_transfer.service import RankKVServer
from parallel.rendezvous import Meeting

CONTROLLER = "twostroke-controller"
NAMESPACE = "twostroke"
PLACEMENT_TIMEOUT_S = 60.0
PROGRESS_POLL_S = 0.2
STOP_S = 5.0


class WorkerActor:
    """Rank 0 of one worker: a process around a worker server, nothing more."""

    def __init__(self, config: WorkerConfig) -> None:
        configure_logging(logging.INFO)
        self._stage = ("starting", 0.0)
        self._server = make_server(config, self._progressed, ranks=RayRanks)

    def _progressed(self, stage: str, fraction: float) -> None:
        self._stage = (stage, fraction)

    async def progress(self) -> tuple[str, float]:
        return self._stage

    async def start(self) -> WorkerInfo:
        return await self._server.start()

    async def wait(self) -> None:
        await self._server.wait()

    async def stop(self) -> None:
        await self._server.stop()


class RankActor:
    """Another rank of a worker. It is owned by rank 0's actor: Ray ends it when that dies."""

    def follow(
        self, meeting: Meeting, rank: int, config: EngineConfig, transfer: TransferConfig
    ) -> None:
        configure_logging(logging.INFO)
        is_local = ipaddress.ip_address(meeting.host).is_loopback
        host: str = meeting.host if is_local else get_node_ip_address()  # type: ignore[no-untyped-call]
        follow(meeting, rank, config, partial(RankKVServer, host, transfer), host=host)


class RayRanks:
    """RankProcesses (engine/distributed_executor.py) as actors in the placement group of rank 0,
    whose actor makes this."""

    def __init__(
        self,
        config: EngineConfig,
        meeting: Meeting,
        on_death: Callable[[str], None],
        transfer: TransferConfig,
    ) -> None:
        self._on_death = on_death
        self._closing = False
        self._ended: list[str] = []
        group, bundles = get_current_placement_group(), place_worker(config).bundles
        assert group is not None, "rank 0 is an actor in a placement group"
        ranks = range(1, len(bundles))
        self._actors = [_rank_actor(group, rank, bundles[rank]) for rank in ranks]
        self._following = {
            actor.follow.remote(meeting, rank, config, transfer): rank
            for actor, rank in zip(self._actors, ranks, strict=True)
        }
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def _watch(self) -> None:
        ended, _ = ray.wait(list(self._following), num_returns=1)
        if self._closing:
            return
        try:
            ray.get(ended[0])
            reason = "it ended by itself"
        except RayError as error:
            reason = str(_cause(error)).partition("\n")[0]
        self._ended.append(f"rank {self._following[ended[0]]} of the worker is gone: {reason}")
        self._on_death(self._ended[0])

    def failure(self) -> str | None:
        return self._ended[0] if self._ended else None

    def close(self, grace_s: float) -> None:
        self._closing = True
        ray.wait(list(self._following), num_returns=len(self._following), timeout=grace_s)
        for actor in self._actors:
            ray.kill(actor)


def _rank_actor(group: PlacementGroup, rank: int, bundle: Bundle) -> Any:
    options = ray.remote(RankActor).options(
        num_cpus=bundle.cpus,
        num_gpus=bundle.gpus,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
    )
    return options.remote()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorker:
    actor: Any
    """Handle of a WorkerActor."""
    group: PlacementGroup
    info: WorkerInfo

    async def wait(self) -> None:
        try:
            await self.actor.wait.remote()
        except RayActorError:
            raise WorkerLostError(f"its process {self.info.pid} died") from None

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self.actor.stop.remote()
        except (TimeoutError, RayActorError, RayTaskError) as error:
            logging.getLogger(__name__).info("%s had to be ended: %r", self.info.worker_id, error)
        finally:
            remove(self.actor, self.group)


def remove(actor: Any, group: PlacementGroup) -> None:
    if actor is not None:
        ray.kill(actor)
    remove_placement_group(group)


class RayLauncher:
    """A placement group and an actor for each launch."""

    async def launch(self, config: WorkerConfig, progress: Progress) -> RayWorker:
        group, actor = await self._place(place_worker(config.engine)), None
        try:
            actor = self._actor(config, group)
            info = await self._start(actor, progress)
        except BaseException as error:
            remove(actor, group)
            raise _cause(error) from None
        return RayWorker(actor=actor, group=group, info=info)

    async def _place(self, placement: WorkerPlacement) -> PlacementGroup:
        bundles = [bundle.resources() for bundle in placement.bundles]
        group: PlacementGroup = placement_group(bundles, strategy=placement.strategy)
        try:
            async with asyncio.timeout(PLACEMENT_TIMEOUT_S):
                await group.ready()
        except BaseException as error:
            remove_placement_group(group)
            if isinstance(error, TimeoutError):
                raise WorkerLostError(f"Ray has no room for {bundles}") from None
            raise
        return group

    def _actor(self, config: WorkerConfig, group: PlacementGroup) -> Any:
        bundle = place_worker(config.engine).bundles[0]
        options = ray.remote(WorkerActor).options(
            name=f"{config.name}/{secrets.token_hex(4)}",
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        return options.remote(config)

    async def _start(self, actor: Any, progress: Progress) -> WorkerInfo:
        reporter = asyncio.create_task(_report(actor, progress))
        try:
            info: WorkerInfo = await actor.start.remote()
            return info
        finally:
            reporter.cancel()


async def _report(actor: Any, progress: Progress) -> None:
    with contextlib.suppress(RayActorError):  # whoever awaits its start sees the same error
        while True:
            progress(*await actor.progress.remote())
            await asyncio.sleep(PROGRESS_POLL_S)


def _cause(error: BaseException) -> BaseException:
    """Our own error out of Ray's wrapping."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    if isinstance(error, RayActorError):
        return WorkerLostError("its process died while it started")
    return error


class ControllerActor:
    """The Supervisor in a detached, named actor: it outlives whoever asked for the cluster.

    If its process dies, Ray starts it again with the same configuration; the workers it owned
    are gone by then, and it launches them anew.
    """

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        configure_logging(logging.INFO)
        self._supervisor = Supervisor(config, RayLauncher())
        await self._supervisor.start()

    async def changed(self, version: int, timeout_s: float) -> ClusterState:
        return await self._supervisor.changed(version, timeout_s)

    async def stop(self) -> None:
        await self._supervisor.stop()


def start_controller(config: ClusterConfig) -> Any:
    """Handle of the controller of this Ray cluster."""
    options = ray.remote(ControllerActor).options(
        name=CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
    )
    return options.remote(config)
