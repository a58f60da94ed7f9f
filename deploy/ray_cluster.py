"""A cluster on a Ray instance of its own on this machine: starts it, uses it, leaves nothing.

Owns the Ray session (daemons, their folder, the access token) and speaks to the controller actor.
Ray listens on the machine's own address whatever it is told, so what keeps others out is a random
token that only this process and its daemons have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from core.config import ClusterConfig
from core.errors import InternalError
from deploy.cluster import Cluster, Observer, ignore
from deploy.placement import total_resources
from deploy.ray_actors import NAMESPACE, start_controller
from deploy.signals import rearm
from deploy.supervisor import ClusterState

OBJECT_STORE_BYTES = 80_000_000
"""Ray's least. Nothing of ours goes through the object store."""
STOP_S = 20.0
EXIT_S = 5.0
MAX_BASE_CHARS = 20
"""Ray's unix sockets lie up to 85 characters deeper; the kernel allows 107 in all."""
REARM_S = 0.02
DAEMON_POLL_S = 0.1
RAY_FOLDER = "r"
"""Inside ours: Ray opens its own to everybody, ours stays closed around it."""
Note = Callable[[str], None]
"""Told in a few words what is being done."""


class RayController:
    """deploy.cluster.Controller: the controller actor, and the Ray session's life around it."""

    def __init__(self, config: ClusterConfig, note: Note) -> None:
        self._config = config
        self._note = note
        self._actor: Any = None
        self._folder: Path | None = None
        self._daemons: list[psutil.Process] = []
        self._keep_logs = False

    async def start(self) -> None:
        self._folder = _make_folder()
        self._note("starting Ray")
        # Shielded: ray.init cannot be interrupted halfway, so a cancelled start waits for it in
        # `stop` and shuts down what it made.
        self._init = asyncio.ensure_future(asyncio.to_thread(_init, self._config, self._folder))
        try:
            await asyncio.shield(_armed(self._init))
        except (RuntimeError, ConnectionError, RayError) as error:
            raise self._failed(f"Ray did not start: {_first_line(error)}") from error
        self._daemons = await asyncio.to_thread(_daemons, self._folder)
        self._note("starting workers")
        self._actor = start_controller(self._config)

    @property
    def log_folder(self) -> str:
        """Logs of Ray and of all workers; gone after a clean stop, kept after a failure."""
        return f"{self._folder}/{RAY_FOLDER}/session_latest/logs"

    async def changed(self, version: int, timeout_s: float) -> ClusterState:
        try:
            state: ClusterState = await self._actor.changed.remote(version, timeout_s)
        except RayError as error:
            raise self._failed(f"the controller is lost: {_first_line(error)}") from error
        self._keep_logs |= any(not slot.fatal for slot in state.failed)
        return state

    def _failed(self, message: str) -> InternalError:
        self._keep_logs = True
        return InternalError(message)

    async def stop(self) -> None:
        if self._folder is None:
            return
        await asyncio.wait([self._init])
        daemons = self._daemons or await asyncio.to_thread(_daemons, self._folder)
        processes = await asyncio.to_thread(_with_descendants, daemons)
        try:
            await self._stop_workers()
            self._note("stopping Ray")
            await asyncio.to_thread(ray.shutdown)
        finally:
            await asyncio.to_thread(_end, processes)
        if self._keep_logs:
            self._note(f"the logs of Ray and the workers are in {self.log_folder}")
        else:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._folder = None

    async def _stop_workers(self) -> None:
        if self._actor is None:
            return
        self._note("stopping workers")
        stopped = asyncio.ensure_future(self._stop_actor())
        ended = asyncio.ensure_future(_any_ended(self._daemons))
        await asyncio.wait([stopped, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, ended):
            task.cancel()
        for result in await asyncio.gather(stopped, ended, return_exceptions=True):
            if isinstance(result, Exception):
                self._note(f"the controller could not be ended: {result!r}")
        self._actor = None

    async def _stop_actor(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self._actor.stop.remote()
        except (TimeoutError, RayError) as error:
            self._note(f"workers did not stop by themselves: {_first_line(error)}")
        ray.kill(self._actor, no_restart=True)


class RayCluster(Cluster):
    """The router here, each worker in a Ray actor, supervised by the controller actor."""

    def __init__(
        self, config: ClusterConfig, *, observer: Observer = ignore, note: Note = lambda _: None
    ) -> None:
        super().__init__(config, RayController(config, note), observer=observer)


def _first_line(error: Exception) -> str:
    """Ray appends whole tracebacks of other processes."""
    return str(error).strip().partition("\n")[0] or repr(error)


def _make_folder() -> Path:
    """Short, because of the sockets in it, and readable by this user only."""
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="twostroke-", dir=base if len(base) <= MAX_BASE_CHARS else "/tmp")
    )


async def _armed(init: asyncio.Future[None]) -> None:
    """Wait for ray.init. Somewhere in it Ray takes SIGTERM for itself, so take it back, again and
    again: a signal in the middle of a start is one of ours too."""
    while not init.done():
        await asyncio.wait([init], timeout=REARM_S)
        rearm()
    await init


def _init(config: ClusterConfig, folder: Path) -> None:
    """Blocks for some five seconds."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray takes these from the environment only, its daemons inherit them. A token of our own: the
    # default would be written to the user's home and shared with every Ray of this user. One per
    # process, because Ray reads it once and keeps it.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # its few lines may go into a file
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    resources = total_resources(config)
    ray.init(
        address="local",
        num_cpus=resources.cpus,
        num_gpus=resources.gpus or None,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
        namespace=NAMESPACE,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / RAY_FOLDER),
    )


def _daemons(folder: Path) -> list[psutil.Process]:
    """Those of our session, known by its folder on their command line."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children():
        try:
            if any(str(folder) in argument for argument in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _with_descendants(daemons: list[psutil.Process]) -> list[psutil.Process]:
    found = list(daemons)
    for daemon in daemons:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += daemon.children(recursive=True)
    return found


async def _any_ended(daemons: list[psutil.Process]) -> None:
    """Returns when one of Ray's daemons is gone (a signal to the whole process group ends them
    too): the workers end with it, and Ray answers no more."""
    while all(_lives(daemon) for daemon in daemons):
        await asyncio.sleep(DAEMON_POLL_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(processes: list[psutil.Process]) -> None:
    """Ray ends its own processes; whatever is left after a moment is killed. Blocks for seconds."""
    _, alive = psutil.wait_procs(processes, timeout=EXIT_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=EXIT_S)
