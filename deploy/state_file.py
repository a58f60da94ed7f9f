"""What `twostroke up` has running on this machine: one small file for each cluster.

A record names a process by pid and start time, so that `down` never ends a stranger who got the
same pid later.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from core.errors import ConfigError

STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    pid: int
    started: float
    """The process's start time as the system tells it."""
    url: str
    model: str
    ready: bool = False


def own_record(*, url: str, model: str) -> ClusterRecord:
    me = psutil.Process()
    return ClusterRecord(pid=me.pid, started=me.create_time(), url=url, model=model)


class Records:
    """The records in one folder. Those of processes that are gone are removed when seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, pid: int) -> Path:
        return self._folder / f"{pid}.json"

    def write(self, record: ClusterRecord) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._path(record.pid).with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record)), encoding="utf-8")
        fresh.replace(self._path(record.pid))

    def remove(self, pid: int) -> None:
        self._path(pid).unlink(missing_ok=True)

    def all(self) -> list[ClusterRecord]:
        """Of clusters that are alive now, oldest first."""
        found = [self._read(path) for path in sorted(self._folder.glob("*.json"))]
        return sorted((record for record in found if record), key=lambda record: record.started)

    def _read(self, path: Path) -> ClusterRecord | None:
        try:
            record = ClusterRecord(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            path.unlink(missing_ok=True)
            return None
        if process_of(record) is None:
            path.unlink(missing_ok=True)
            return None
        return record


def process_of(record: ClusterRecord) -> psutil.Process | None:
    """The very process the record speaks of, if it still runs."""
    try:
        process = psutil.Process(record.pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if alive and process.create_time() == record.started else None
    except psutil.NoSuchProcess:
        return None


def choose(
    records: Sequence[ClusterRecord], port: int | None, *, every: bool = False
) -> list[ClusterRecord]:
    """The clusters that `down` means. Raises ConfigError when there is none on `port`, or when it
    is not said which of several."""
    if port is None:
        if len(records) > 1 and not every:
            raise ConfigError(f"{several(records)}; say --port PORT or --all")
        return list(records)
    chosen = [record for record in records if record.url.endswith(f":{port}")]
    if not chosen:
        raise ConfigError(f"no cluster started by `twostroke up` listens on port {port}")
    return chosen


def several(records: Sequence[ClusterRecord]) -> str:
    return f"{len(records)} clusters run here ({', '.join(record.url for record in records)})"


def stop(record: ClusterRecord, timeout_s: float = STOP_S) -> bool:
    """Ask the cluster to end, insist after `timeout_s`. False when it had to be killed."""
    process = process_of(record)
    if process is None:
        return True
    family = process.children(recursive=True)
    process.terminate()
    _, alive = psutil.wait_procs([process, *family], timeout=timeout_s)
    for survivor in alive:
        try:
            survivor.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=5.0)
    return not alive
