"""`twostroke up`: a cluster on this machine, in the foreground or detached."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from core.config import ClusterConfig
from core.model_files import load_model_config
from core.worker import WorkerRole, endpoint
from deploy.cluster import Cluster, check_port
from deploy.config_file import Settings, cluster_config
from deploy.console import ClusterView
from deploy.local import LocalCluster
from deploy.model_source import resolve_model
from deploy.processes import ProcessCluster
from deploy.ray_cluster import RayCluster
from deploy.signals import run_until_stopped
from deploy.state_file import ClusterRecord, Records, own_record
from engine.models.registry import check_architecture
from parallel.partition import check_shape

POLL_S = 0.2


def prepare(settings: Settings) -> ClusterConfig:
    """Everything that can be wrong and is cheap to find out, before anything is started."""
    model = resolve_model(settings.model)
    read = load_model_config(model.path)
    check_architecture(read.architecture)
    check_port(settings.host, settings.port)
    config = cluster_config(settings, model)
    for role in config.num_workers:
        check_shape(read, config.pool(role).parallel)
    return config


class Backend(StrEnum):
    """Where the workers of a cluster on this machine live."""

    RAY = "ray"
    PROCESSES = "processes"
    LOCAL = "local"
    """In this very process."""


def make_cluster(config: ClusterConfig, view: ClusterView, backend: Backend) -> Cluster:
    if backend is Backend.RAY:
        return RayCluster(config, observer=view, note=view.note)
    kind = ProcessCluster if backend is Backend.PROCESSES else LocalCluster
    return kind(config, observer=view)


def up(settings: Settings, *, backend: Backend, records: Records) -> int:
    """Serve until Ctrl-C, SIGTERM or a failure nobody can mend."""
    config = prepare(settings)
    url = f"http://{endpoint(settings.host, settings.port)}"
    record = own_record(url=url, model=config.router.served_model_name)
    records.write(record)
    try:
        return run_until_stopped(lambda: _serve(config, record, records, backend))
    finally:
        records.remove(record.pid)


async def _serve(
    config: ClusterConfig, record: ClusterRecord, records: Records, backend: Backend
) -> int:
    with ClusterView() as view:
        view.note(f"serving {record.model} with {describe(config)}")
        async with make_cluster(config, view, backend) as cluster:
            records.write(replace(record, url=cluster.url, ready=True))
            view.note(f"ready: {cluster.url}/v1 ({_how_to_stop()}; `twostroke chat` talks to it)")
            await cluster.wait()
    return 0


def _how_to_stop() -> str:
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    return "Ctrl-C stops it" if at_terminal else "`twostroke down` stops it"


def describe(config: ClusterConfig) -> str:
    engine = config.engine
    weights = f" with {engine.quantization} weights" if engine.quantization else ""
    counts = " and ".join(_pool(config, role) for role in config.num_workers)
    unit = "worker" if config.num_ranks == sum(config.num_workers.values()) else "rank"
    return f"{counts} workers, {engine.dtype}{weights}, threads per {unit}: {engine.num_threads}"


def _pool(config: ClusterConfig, role: WorkerRole) -> str:
    pool = config.pool(role)
    shape = f"x{pool.parallel}" if pool.parallel.world_size > 1 else ""
    return f"{pool.count}{shape} {role}"


def detach(arguments: Sequence[str], settings: Settings, *, records: Records, logs: Path) -> int:
    """Start `twostroke up ARGUMENTS` in a session of its own; return when it serves or failed."""
    prepare(settings)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"up-{time.strftime('%Y%m%d-%H%M%S')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _follow(process, records, log)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        return 130


def _follow(process: subprocess.Popen[bytes], records: Records, log: Path) -> int:
    with log.open(encoding="utf-8", errors="replace") as lines:
        while True:
            code = process.poll()
            ready = any(record.pid == process.pid and record.ready for record in records.all())
            sys.stderr.write(lines.read())
            if code is not None:
                return code
            if ready:
                print(f"running as process {process.pid}; `twostroke down` stops it; log: {log}")
                process.returncode = 0  # ours no longer: it shall outlive us without a warning
                return 0
            time.sleep(POLL_S)
