"""The whole contract between a scheduler and whoever runs the model: one step as a value.

A Batch is small and typed, so that rank 0 can send it to other ranks as it is. What is built for
every sequence in every step is a NamedTuple, at a third of a frozen dataclass's cost; fields are
given by name all the same. `build_inputs` is pure: it turns the batch into the flat tensors of a
forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.request import TokenLogprobs
from core.sampling_params import SamplingParams


class Pooling(StrEnum):
    """How a sequence's hidden states become one vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    CLASSIFY = "classify"
    """The scores of a classifier's labels instead."""


class SampleSpec(NamedTuple):
    """What the sampler needs for one token: nothing here depends on the rest of the batch."""

    sampling: SamplingParams
    choice_index: int
    position: int
    """Position of the sampled token in its sequence (prompt and output counted)."""
    num_logprobs: int | None = None
    """Report the token's log probability and those of this many likeliest ones."""
    prompt_token_ids: tuple[int, ...] = ()
    """With output_token_ids: given only where sampling.reads_tokens."""
    output_token_ids: tuple[int, ...] = ()
    barred_token_ids: tuple[int, ...] = ()
    """Not yet allowed: what would end the output before min_tokens."""


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: compute `token_ids` after what is computed already."""

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    """Covers at least num_computed_tokens + len(token_ids) positions."""
    samples: tuple[SampleSpec, ...] = ()
    """One per token to draw from the logits of the last position: several where choices share a
    prompt, none for a chunk that does not reach the end of the sequence's known tokens."""
    num_prompt_logprobs: int | None = None
    """Report log probabilities of the tokens that follow each of `token_ids` ..."""
    next_token_ids: tuple[int, ...] = ()
    """... which are these (one fewer when the chunk reaches the end of the prompt)."""
    pooling: Pooling | None = None
    attempt: int = 0
    choice_index: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Two attempts of one request may meet on one worker; they are different sequences."""
        return self.request_id, self.attempt

    @property
    def sequence_key(self) -> tuple[str, int, int]:
        return self.request_id, self.attempt, self.choice_index


class BlockCopy(NamedTuple):
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[BlockCopy, ...] = ()
    """Done before anything else in the step: a shared block that is about to be written to."""

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


class Sampled(NamedTuple):
    token_id: int | None
    """None: there was none to choose, and this sequence alone has failed."""
    logprobs: TokenLogprobs | None = None
    all_barred: bool = False
    """Why there was none: the request's own parameters bar every token (else: the model's logits
    are not finite)."""


class SequenceResult(NamedTuple):
    """What a step says of one of its sequences."""

    sampled: tuple[Sampled, ...] = ()
    """One per SampleSpec."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per item of next_token_ids."""
    is_finite: bool = True
    """False: the step gave it something that is no number; nothing of it may be used."""
    pooled: Tensor | None = None
    """[hidden_size] float32: the sum of the chunk's hidden states for MEAN, its first for CLS, its
    last for LAST; for CLASSIFY [num_labels] scores of its first."""


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
    """[num_samples] int64: rows of the flat batch whose next token is wanted, one per sequence
    with samples."""
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
    tables = [block_table(sequence, block_size) for sequence in sequences]
    width = max(map(len, tables))
    rows = [table + table[-1:] * (width - len(table)) for table in tables]
    block_tables = torch.from_numpy(np.array(rows, np.int64))  # 8 times faster than torch.tensor
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


def block_table(sequence: ScheduledSequence, block_size: int) -> tuple[int, ...]:
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
        if sequence.samples
    ]
