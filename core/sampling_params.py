"""How one request wants its tokens chosen. Validated on construction: an instance is always sane.

Sampling is a pure function of (logits, these parameters, seed, choice index, position): nothing
here is mutable and nothing here depends on the rest of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.errors import InvalidRequestError

MAX_STOP_TOKEN_IDS = 128
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""Of what is a count or a token id; it has 32 bits on the wire."""


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message, param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filter off.

    Raises InvalidRequestError naming the parameter when a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    """Output tokens at most, counted over all attempts (output_token_ids included)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _require(math.isfinite(getattr(self, name)), name, f"{name} must be a finite number")
        _require(0.0 <= self.temperature <= 2.0, "temperature", "temperature must be in [0, 2]")
        _require(0 <= self.top_k <= MAX_COUNT, "top_k", "top_k must be 0 (off) or a 31-bit integer")
        _require(0.0 < self.top_p <= 1.0, "top_p", "top_p must be in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "min_p must be in [0, 1]")
        _require(abs(self.seed) <= MAX_SEED, "seed", "seed must fit in 64 bits")
        _require(1 <= self.max_tokens <= MAX_COUNT, "max_tokens", "max_tokens must be at least 1")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
            and all(0 <= token_id <= MAX_COUNT for token_id in self.stop_token_ids),
            "stop_token_ids",
            f"stop_token_ids must be at most {MAX_STOP_TOKEN_IDS} non-negative integers",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
