"""What became of each request: one log line at its end, the last ones kept for /debug/requests.

Never holds or prints prompt text or output.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import asdict, fields
from typing import Any

from core.lifetime import Lifetime
from router.choice import LifetimeObserver

logger = logging.getLogger("router.requests")

MAX_KEPT = 1000
_STAMPS = ("tokenized", "prefill_sent", "first_token", "decode_sent", "second_token", "finished")


class RequestLog(LifetimeObserver):
    """Running requests and the last MAX_KEPT ended ones."""

    def __init__(self, model: str, max_kept: int = MAX_KEPT) -> None:
        self._model = model
        self._max_kept = max_kept
        self._running: dict[str, Lifetime] = {}
        self._ended: OrderedDict[str, Lifetime] = OrderedDict()

    def began(self, life: Lifetime) -> None:
        self._running[life.request_id] = life

    def ended(self, life: Lifetime) -> None:
        self._running.pop(life.request_id, None)
        self._ended[life.request_id] = life
        while len(self._ended) > self._max_kept:
            self._ended.popitem(last=False)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", log_line(life, self._model))

    def find(self, request_id: str) -> Lifetime | None:
        return self._running.get(request_id) or self._ended.get(request_id)

    def recent(self) -> list[Lifetime]:
        """Newest first; running ones before ended ones."""
        return [*reversed(self._running.values()), *reversed(self._ended.values())]


def log_line(life: Lifetime, model: str) -> str:
    """`key=value` pairs; durations in milliseconds, `-` for what did not happen."""
    prefill, decode = life.prefill, life.decode
    pairs: dict[str, object] = {
        "id": life.request_id,
        "model": model,
        "outcome": life.outcome,
        "prompt_tokens": life.num_prompt_tokens,
        "output_tokens": life.num_output_tokens,
        "cached_tokens": prefill.num_cached_tokens if prefill else None,
        "predicted_cached_tokens": life.predicted_cached_tokens,
        "queue_ms": _ms(prefill.queue_s if prefill else None),
        "prefill_ms": _ms(prefill.prefill_s if prefill else None),
        "transfer_ms": _ms(decode.transfer_s if decode else None),
        "transfer_bytes": decode.num_pulled_bytes if decode else None,
        "decode_ms": _ms(decode.decode_s if decode else None),
        "ttft_ms": _ms(life.ttft_s),
        "tpot_ms": _ms(life.tpot_s),
        "total_ms": _ms(None if life.finished is None else life.finished - life.arrived),
        "attempts": life.attempts,
        "prefill_worker": life.prefill_worker,
        "decode_worker": life.decode_worker,
    }
    line = " ".join(f"{key}={'-' if value is None else value}" for key, value in pairs.items())
    return line + (f" notes={'; '.join(life.notes)!r}" if life.notes else "")


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.1f}"


def timeline(life: Lifetime) -> dict[str, Any]:
    """A Lifetime as JSON. Stamps become seconds since arrival; workers' parts are durations of
    their own clocks and stay as they are."""
    row: dict[str, Any] = {field.name: getattr(life, field.name) for field in fields(life)}
    for name in _STAMPS:
        row[name] = None if row[name] is None else row[name] - life.arrived
    row["arrived"] = 0.0
    row["prefill"] = None if life.prefill is None else asdict(life.prefill)
    row["decode"] = None if life.decode is None else asdict(life.decode)
    row["ttft_s"], row["tpot_s"] = life.ttft_s, life.tpot_s
    row["notes"] = list(life.notes)
    return row
