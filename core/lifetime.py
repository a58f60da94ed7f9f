"""Where the time of one request went.

Clocks of two hosts are never compared: each worker reports durations of its own monotonic clock,
the router stamps its own, and the timeline is put together from both.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """What the worker that read the prompt measured. Seconds and tokens."""

    queue_s: float
    """Arrival at the worker until its first token was scheduled."""
    prefill_s: float
    """First scheduled until the first output token was sampled."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """What the worker that wrote the answer measured. Seconds, tokens, blocks, bytes."""

    queue_s: float
    """Arrival at the worker until its blocks were allocated."""
    transfer_s: float
    """Blocks allocated until the last one arrived, was verified and was noticed by the step thread:
    beside running sequences that contains the rest of their step."""
    decode_s: float
    """KV complete until the last token was sampled."""
    num_cached_blocks: int
    """Prompt blocks the decode worker already held."""
    num_pulled_blocks: int
    num_pulled_bytes: int
    num_steps: int


@dataclass(slots=True, kw_only=True)
class Lifetime:
    """One request as the router saw it. Stamps are seconds of the router's monotonic clock.

    Mutable on purpose: it is filled in as the request goes along and never read by a decision.
    """

    request_id: str
    arrived: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    tokenized: float | None = None
    prefill_sent: float | None = None
    first_token: float | None = None
    decode_sent: float | None = None
    second_token: float | None = None
    finished: float | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    predicted_cached_tokens: int = 0
    prefill: PrefillTimes | None = None
    decode: DecodeTimes | None = None
    attempts: int = 0
    outcome: str = "running"
    """running, or a FinishReason, or an error code."""
    notes: list[str] = field(default_factory=list)
    """Why it was routed again, if it was."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.finished is None or self.first_token is None or self.num_output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.num_output_tokens - 1)
