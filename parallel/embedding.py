"""Token embedding and LM head, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from parallel.groups import Placement
from parallel.linear import parameter
from parallel.partition import vocab_range, vocab_shard_size
from parallel.weights import StoredTensor, WeightSlot, copy_shard


def _vocab_parameter(vocab_size: int, hidden_size: int, placement: Placement) -> nn.Parameter:
    """Padding rows of the last ranks stay zero."""
    weight = parameter(placement, vocab_shard_size(vocab_size, placement.group.size), hidden_size)
    return nn.Parameter(weight.zero_(), requires_grad=False)


def _load(weight: Tensor, local: range, stored: StoredTensor) -> None:
    copy_shard(weight[: len(local)], stored, first_row=local.start)


class VocabParallelEmbedding(nn.Module):
    """[num_tokens] int64 -> [num_tokens, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.group = placement.group
        self.vocab_size = vocab_size
        self.local = vocab_range(vocab_size, self.group.rank, self.group.size)
        self.weight = _vocab_parameter(vocab_size, hidden_size, placement)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        mine = (token_ids >= self.local.start) & (token_ids < self.local.stop)
        rows = F.embedding((token_ids - self.local.start) * mine, self.weight)
        return self.group.all_reduce(rows * mine.unsqueeze(-1))

    def weight_slots(self) -> Iterator[WeightSlot]:
        shape = (self.vocab_size, self.weight.shape[1])
        yield WeightSlot("weight", shape, partial(_load, self.weight, self.local))


class ParallelLMHead(nn.Module):
    """[num_rows, hidden_size] -> logits [num_rows, vocab_size], whole on every rank.

    With `tied` it shares the embedding's parameter and has no slot of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabParallelEmbedding | None,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.group = placement.group
        self.vocab_size = vocab_size
        self.local = vocab_range(vocab_size, self.group.rank, self.group.size)
        self.tied = tied is not None
        self.weight = (
            _vocab_parameter(vocab_size, hidden_size, placement) if tied is None else tied.weight
        )

    def forward(self, hidden: Tensor) -> Tensor:
        shards = self.group.all_gather(F.linear(hidden, self.weight))
        return shards.movedim(0, 1).flatten(1)[:, : self.vocab_size]

    def weight_slots(self) -> Iterator[WeightSlot]:
        if not self.tied:
            shape = (self.vocab_size, self.weight.shape[1])
            yield WeightSlot("weight", shape, partial(_load, self.weight, self.local))
