"""Desired workers against actual workers: what to start and what to stop. Pure: no I/O, no clock.

A slot is a place for a worker that lasts ("decode-1"); each launch fills it with another
process. `reconcile` says what to do now; `started`, `progressed` and `died` fold in what happened.
News of an earlier launch of a slot is ignored: late messages of a dead process change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from core.worker import WorkerRole

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_S = 30.0
"""A worker that served this long had nothing wrong with its start: its next death counts as one."""
MAX_FAILED_STARTS = 3
"""Deaths in a row before a slot that was never ready is given up."""


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """Died; to be started again at `retry_at`."""
    FAILED = "failed"
    """Given up: starting it again would fail the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlot:
    """One worker as the controller sees it. Times are seconds of the owner's clock."""

    name: str
    role: WorkerRole
    phase: Phase = Phase.WAITING
    launch: int = 0
    """Counts launches of this slot; 0: never launched."""
    failures: int = 0
    """Deaths in a row, none of them after a stable time of service."""
    retry_at: float = 0.0
    ready_since: float | None = None
    was_ready: bool = False
    address: str | None = None
    pid: int | None = None
    stage: str = ""
    """What it does while starting, and how far it is: 0 to 1."""
    fraction: float = 0.0
    error: str | None = None
    """Why it died last."""
    fatal: bool = False
    """That reason lies in what was asked for (a bad model), not in chance."""


WorkerSlots = Mapping[str, WorkerSlot]


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    num_prefill: int = 0
    num_decode: int = 0
    num_colocated: int = 0

    def names(self) -> Iterator[tuple[str, WorkerRole]]:
        for role, count in (
            (WorkerRole.PREFILL, self.num_prefill),
            (WorkerRole.DECODE, self.num_decode),
            (WorkerRole.COLOCATED, self.num_colocated),
        ):
            for index in range(count):
                yield f"{role.value}-{index}", role


NOTHING = Desired()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`slots` is the state after the actions; `wake_at` is when to reconcile again, if nothing
    happens before."""

    slots: dict[str, WorkerSlot] = field(default_factory=dict)
    launch: tuple[WorkerSlot, ...] = ()
    stop: tuple[WorkerSlot, ...] = ()
    wake_at: float | None = None


def reconcile(desired: Desired, slots: WorkerSlots, now: float) -> Plan:
    """Launch each desired slot that waits and is due; stop what is not desired any more."""
    wanted = {
        name: slots.get(name) or WorkerSlot(name=name, role=role) for name, role in desired.names()
    }
    due = [slot for slot in wanted.values() if _due(slot, now)]
    launched = tuple(_launched(slot) for slot in due)
    after = wanted | {slot.name: slot for slot in launched}
    retries = [slot.retry_at for slot in after.values() if slot.phase is Phase.WAITING]
    surplus = [slot for name, slot in slots.items() if name not in wanted]
    return Plan(
        slots=after,
        launch=launched,
        stop=tuple(slot for slot in surplus if slot.phase in (Phase.STARTING, Phase.READY)),
        wake_at=min(retries, default=None),
    )


def _due(slot: WorkerSlot, now: float) -> bool:
    return slot.phase is Phase.WAITING and slot.retry_at <= now


def _launched(slot: WorkerSlot) -> WorkerSlot:
    return replace(
        slot, phase=Phase.STARTING, launch=slot.launch + 1, stage="starting", fraction=0.0
    )


def _update(slots: WorkerSlots, name: str, launch: int, **changes: object) -> dict[str, WorkerSlot]:
    """`slots` with one slot changed, if that launch is still the one that fills it."""
    slot = slots.get(name)
    if slot is None or slot.launch != launch or slot.phase in (Phase.WAITING, Phase.FAILED):
        return dict(slots)
    return dict(slots) | {name: replace(slot, **changes)}  # type: ignore[arg-type]


def progressed(
    slots: WorkerSlots, name: str, launch: int, stage: str, fraction: float
) -> dict[str, WorkerSlot]:
    return _update(slots, name, launch, stage=stage, fraction=fraction)


def started(
    slots: WorkerSlots, name: str, launch: int, *, address: str, pid: int, now: float
) -> dict[str, WorkerSlot]:
    return _update(
        slots, name, launch, phase=Phase.READY, was_ready=True, ready_since=now, address=address,
        pid=pid, stage="ready", fraction=1.0, error=None,
    )  # fmt: skip


def died(
    slots: WorkerSlots, name: str, launch: int, *, error: str, fatal: bool, now: float
) -> dict[str, WorkerSlot]:
    """The worker of that launch has ended, or could not start. `fatal` as in WorkerSlot."""
    slot = slots.get(name)
    if slot is None:
        return dict(slots)
    stable = slot.ready_since is not None and now - slot.ready_since >= STABLE_S
    failures = 1 if stable else slot.failures + 1
    hopeless = fatal or (failures >= MAX_FAILED_STARTS and not slot.was_ready)
    return _update(
        slots, name, launch, phase=Phase.FAILED if hopeless else Phase.WAITING, failures=failures,
        retry_at=now + backoff(failures), ready_since=None, address=None, pid=None, error=error,
        fatal=fatal, stage="", fraction=0.0,
    )  # fmt: skip


def backoff(failures: int) -> float:
    """Seconds to wait after that many deaths in a row: doubles, bounded, never zero."""
    return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures - 1, 10)))
