"""What people see while a cluster starts and runs: bars on a terminal, lines elsewhere.

Writes to standard error, so that standard output holds answers only.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deploy.controller import Phase, WorkerSlot
from deploy.supervisor import ClusterState

QUARTERS = 4


class ClusterView:
    """An Observer and a Note for a Cluster. Use as a context manager around it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._began = time.monotonic()
        self._seen: dict[str, WorkerSlot] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("  {task.description:10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=self._console,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_bars()

    def _stop_bars(self) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def note(self, text: str) -> None:
        self._stop_bars()
        elapsed = time.monotonic() - self._began
        self._console.print(f"[{elapsed:5.1f}s] {text}", markup=False, soft_wrap=True)

    def __call__(self, state: ClusterState) -> None:
        for slot in state.slots:
            before = self._seen.get(slot.name)
            self._seen[slot.name] = slot
            if before != slot:
                self._show(before, slot)

    def _show(self, before: WorkerSlot | None, slot: WorkerSlot) -> None:
        if slot.phase in (Phase.WAITING, Phase.FAILED) and slot.error:
            again = "it will be started again" if slot.phase is Phase.WAITING else "given up"
            self.note(f"{slot.name} died: {slot.error}; {again}")
        elif self._console.is_terminal:
            self._show_bar(slot)
        elif _worth_a_line(before, slot):
            self.note(f"{slot.name}: {slot.stage}{_percent(slot)}")

    def _show_bar(self, slot: WorkerSlot) -> None:
        if slot.name not in self._tasks:
            self._tasks[slot.name] = self._bars.add_task(slot.name, total=1.0, stage="")
        if slot.phase is Phase.STARTING:
            self._bars.start()
        self._bars.update(self._tasks[slot.name], completed=slot.fraction, stage=slot.stage)
        if all(seen.phase is Phase.READY for seen in self._seen.values()):
            self._stop_bars()


def _worth_a_line(before: WorkerSlot | None, slot: WorkerSlot) -> bool:
    if before is None or before.stage != slot.stage:
        return True
    return int(before.fraction * QUARTERS) != int(slot.fraction * QUARTERS)


def _percent(slot: WorkerSlot) -> str:
    return f" {slot.fraction:.0%}" if slot.phase is Phase.STARTING and slot.fraction else ""
