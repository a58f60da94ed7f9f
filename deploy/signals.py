"""Ctrl-C and SIGTERM: the first asks for a clean stop, the second ends everything at once.

Two within ONE_SIGNAL_S are one: whoever signals a process and its group (`timeout`, a shell) means
a single stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL_S = 0.5


Main = Callable[[], Coroutine[Any, Any, int]]


def run_until_stopped(main: Main, *, interrupted: int = 0, quiet: bool = False) -> int:
    """Run `main()` on a fresh event loop. A signal cancels it, so that its context managers clean
    up; then the exit code is `interrupted`. `quiet`: say nothing to people about it."""
    return asyncio.run(_guarded(main, interrupted, quiet))


async def _guarded(main: Main, interrupted: int, quiet: bool) -> int:
    work = asyncio.create_task(main())
    stopping: float | None = None
    """When the first signal came."""

    def on_signal() -> None:
        nonlocal stopping
        if stopping is not None:
            if time.monotonic() - stopping < ONE_SIGNAL_S:
                return
            kill_descendants()
            os._exit(130)
        stopping = time.monotonic()
        if not quiet:
            print("\nstopping (once more to force it)", file=sys.stderr, flush=True)
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await work
    except asyncio.CancelledError:
        if stopping is None:
            raise
        return interrupted
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def rearm() -> None:
    """Make Python's handlers count again after a C library has put its own in their place.

    Ray does: its own dumps addresses and ends the process. Elsewhere than in the main thread there
    are no handlers to care for.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler is not None:  # None: none of Python's
            signal.signal(number, handler)
            signal.siginterrupt(number, False)  # as asyncio has it


def kill_descendants() -> None:
    """Everything below this process was started by it."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
