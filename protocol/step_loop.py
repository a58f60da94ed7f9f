"""The thread that owns one worker: everything that touches its scheduler or pool runs here.

Other threads hand in commands; between two steps all of them are applied, so an abort always comes
before the outputs of the step it arrived in.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Command = Callable[[], None]
IDLE_POLL_S = 0.02
"""How often an idle worker looks at what has no wake-up call: lease expiry and the like."""


class StepLoop:
    """Calls `step()` for ever; it returns whether it did any work. `step` must handle its own
    operational errors: what it raises is a bug and ends the loop through `on_failure`."""

    def __init__(
        self, step: Callable[[], bool], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._step = step
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run `command` on the step thread before the next step. Thread-safe, never blocks."""
        self._commands.put(command)

    def wake(self) -> None:
        """End an idle wait: something the step polls has changed."""
        self._commands.put(_nothing)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the current step. Commands posted later never run."""
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            worked = False
            while not self._stopping.is_set():
                self._apply_commands(wait=not worked)
                worked = self._step()
        except BaseException as error:
            logger.exception("the step loop died")
            self._on_failure(error)

    def _apply_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(timeout=IDLE_POLL_S)() if wait else self._commands.get_nowait()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return


def _nothing() -> None:
    return None
