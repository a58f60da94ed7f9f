"""What every process of ours writes to standard error: a log, one line per event, and how far a
worker of its own has come with loading."""

from __future__ import annotations

import logging
import sys

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: int) -> None:
    """Once, where a process begins."""
    logging.basicConfig(level=level, format=LOG_FORMAT)


QUARTERS = 4


class ProgressLines:
    """core.worker.Progress as lines: each new stage, and each quarter of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = ("", 0)

    def __call__(self, stage: str, fraction: float) -> None:
        now = (stage, int(fraction * QUARTERS))
        if now != self._last:
            self._last = now
            print(f"{self._name}: {stage} {fraction:.0%}", file=sys.stderr, flush=True)
