"""What runs inside Ray: one actor per rank, and the detached controller that keeps them running.

Ray places processes and says when one has died; it restarts none of them, because a restarted
worker has another address and nothing of the old one's KV: that is a new launch, decided by
deploy.controller. No token ever passes through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import ClusterConfig, WorkerConfig
from core.errors import WorkerLostError
from core.worker import Progress, WorkerInfo
from deploy.logs import configure_logging
from deploy.placement import WorkerPlacement, place_worker
from deploy.supervisor import ClusterState, Supervisor
from deploy.workers import make_server

CONTROLLER = "twostroke-controller"
NAMESPACE = "twostroke"
PLACEMENT_TIMEOUT_S = 60.0
PROGRESS_POLL_S = 0.2
STOP_S = 5.0


class RankActor:
    """One rank of one worker: a process around a worker server, nothing more."""

    def __init__(self, config: WorkerConfig) -> None:
        configure_logging(logging.INFO)
        self._stage = ("starting", 0.0)
        self._server = make_server(config, self._progressed)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorker:
    actor: Any
    """Handle of a RankActor."""
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
        options = ray.remote(RankActor).options(
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

    If its process dies, Ray starts it again with the same configuration; the rank actors it owned
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
