"""Token embedding and LM head, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from parallel.groups import Placement
from parallel.partition import vocab_range, vocab_shard_size
from parallel.weight_formats import Weight, make_weight
from parallel.weights import WeightSlot


def _vocab_weight(vocab_size: int, hidden_size: int, placement: Placement) -> Weight:
    """Padding rows of the last ranks stay zero. At least 8 bits: 4 bits here cost perplexity for
    little memory (docs/quantization.md)."""
    num_rows = vocab_shard_size(vocab_size, placement.group.size)
    placement = replace(placement, quantization=placement.quantization and "int8")
    return make_weight(num_rows, hidden_size, placement=placement)


def _vocab_slot(weight: Weight, vocab_size: int, local: range) -> WeightSlot:
    load = partial(weight.load, rows=range(len(local)), first_row=local.start)
    return WeightSlot("weight", (vocab_size, weight.in_features), load)


class VocabParallelEmbedding(nn.Module):
    """[num_tokens] int64 -> [num_tokens, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.group = placement.group
        self.vocab_size = vocab_size
        self.local = vocab_range(vocab_size, self.group.rank, self.group.size)
        self.weight = _vocab_weight(vocab_size, hidden_size, placement)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.weight.rows(token_ids)
        mine = (token_ids >= self.local.start) & (token_ids < self.local.stop)
        rows = self.weight.rows((token_ids - self.local.start) * mine)
        return self.group.all_reduce(rows * mine.unsqueeze(-1))

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield _vocab_slot(self.weight, self.vocab_size, self.local)


class ParallelLMHead(nn.Module):
    """[num_rows, hidden_size] -> logits [num_rows, vocab_size], whole on every rank.

    With `tied` it shares the embedding's weight and has no slot of its own.
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
            _vocab_weight(vocab_size, hidden_size, placement) if tied is None else tied.weight
        )

    def forward(self, hidden: Tensor) -> Tensor:
        shards = self.group.all_gather(self.weight.matmul(hidden))
        return shards.movedim(0, 1).flatten(1)[:, : self.vocab_size]

    def weight_slots(self) -> Iterator[WeightSlot]:
        if not self.tied:
            yield _vocab_slot(self.weight, self.vocab_size, self.local)
