"""Ctrl-C and SIGTERM: the first asks for a clean stop, the second ends everything at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)


Main = Callable[[], Coroutine[Any, Any, int]]


def run_until_stopped(main: Main, *, interrupted: int = 0, quiet: bool = False) -> int:
    """Run `main()` on a fresh event loop. A signal cancels it, so that its context managers clean
    up; then the exit code is `interrupted`. `quiet`: say nothing to people about it."""
    return asyncio.run(_guarded(main, interrupted, quiet))


async def _guarded(main: Main, interrupted: int, quiet: bool) -> int:
    work = asyncio.create_task(main())
    stopping = False

    def on_signal() -> None:
        nonlocal stopping
        if stopping:
            kill_descendants()
            os._exit(130)
        stopping = True
        if not quiet:
            print("\nstopping (once more to force it)", file=sys.stderr, flush=True)
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await work
    except asyncio.CancelledError:
        if not stopping:
            raise
        return interrupted
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def kill_descendants() -> None:
    """Everything below this process was started by it."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
