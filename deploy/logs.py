"""How every process of ours writes its log: to standard error, one line per event."""

from __future__ import annotations

import logging

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: int) -> None:
    """Once, where a process begins."""
    logging.basicConfig(level=level, format=LOG_FORMAT)
