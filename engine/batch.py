"""The whole contract between a scheduler and whoever runs the model: one step as a value.

A Batch is small and typed, so that rank 0 can send it to other ranks as it is. `build_inputs` is
pure: it turns the batch into the flat tensors of a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """What the sampler needs for one row: nothing here depends on the rest of the batch."""

    sampling: SamplingParams
    choice_index: int
    position: int
    """Position of the sampled token in its sequence (prompt and output counted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's share of a step: compute `token_ids` after what is computed already."""

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    """Covers at least num_computed_tokens + len(token_ids) positions."""
    sample: SampleSpec | None
    """None for a chunk that does not reach the end of the sequence's known tokens."""
    attempt: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Two attempts of one request may meet on one worker; they are different sequences."""
        return self.request_id, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)
