"""The whole contract between a scheduler and whoever runs the model: one step as a value.

A Batch is small and typed, so that rank 0 can send it to other ranks as it is. `build_inputs` is
pure: it turns the batch into the flat tensors of a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """A batch as flat tensors: the tokens of all sequences one after another, nothing padded.

    What shapes depend on is also on the host, as tuples with one item per sequence.
    """

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64: position of each token in its sequence."""
    slot_mapping: Tensor
    """[num_tokens] int64: block_id * block_size + offset, where each token's KV goes."""
    block_tables: Tensor
    """[num_sequences, max(num_blocks)] int64, padded with the sequence's own last block."""
    sample_rows: Tensor
    """[num_samples] int64: rows of the flat batch whose next token is wanted."""
    query_starts: tuple[int, ...]
    """First row of each sequence."""
    query_lens: tuple[int, ...]
    """Tokens of each sequence in this step."""
    seq_lens: tuple[int, ...]
    """Tokens of each sequence that have KV after this step."""
    num_blocks: tuple[int, ...]
    """Blocks those take."""


def build_inputs(batch: Batch, *, block_size: int, device: torch.device) -> ForwardInputs:
    """The forward pass that `batch` asks for. Needs at least one sequence."""
    sequences = batch.sequences
    query_lens = tuple(len(sequence.token_ids) for sequence in sequences)
    query_starts = (0, *accumulate(query_lens[:-1]))
    tables = [_block_table(sequence, block_size) for sequence in sequences]
    width = max(map(len, tables))
    block_tables = torch.tensor([table + table[-1:] * (width - len(table)) for table in tables])
    computed = torch.tensor([sequence.num_computed_tokens for sequence in sequences])
    lens = torch.tensor(query_lens)
    owner = torch.arange(len(sequences)).repeat_interleave(lens)
    positions = torch.arange(len(owner)) + (computed - torch.tensor(query_starts))[owner]
    blocks = block_tables[owner, positions // block_size]
    return ForwardInputs(
        token_ids=torch.tensor(list(chain.from_iterable(s.token_ids for s in sequences))).to(
            device
        ),
        positions=positions.to(device),
        slot_mapping=(blocks * block_size + positions % block_size).to(device),
        block_tables=block_tables.to(device),
        sample_rows=torch.tensor(_sample_rows(sequences, query_starts), dtype=torch.int64).to(
            device
        ),
        query_starts=query_starts,
        query_lens=query_lens,
        seq_lens=tuple(s.num_computed_tokens + len(s.token_ids) for s in sequences),
        num_blocks=tuple(map(len, tables)),
    )


def _block_table(sequence: ScheduledSequence, block_size: int) -> tuple[int, ...]:
    """The blocks that hold this sequence after the step, without those allocated ahead."""
    seq_len = sequence.num_computed_tokens + len(sequence.token_ids)
    num_blocks = -(-seq_len // block_size)
    assert sequence.token_ids, f"{sequence.request_id} is scheduled without tokens"
    assert len(sequence.block_ids) >= num_blocks, (
        f"{sequence.request_id}: {seq_len} tokens in {len(sequence.block_ids)} blocks"
    )
    return sequence.block_ids[:num_blocks]


def _sample_rows(
    sequences: tuple[ScheduledSequence, ...], query_starts: tuple[int, ...]
) -> list[int]:
    """The last row of every sequence that wants a token."""
    return [
        start + len(sequence.token_ids) - 1
        for sequence, start in zip(sequences, query_starts, strict=True)
        if sequence.sample is not None
    ]
