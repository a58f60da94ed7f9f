"""Linear layers that hold one rank's shard of their weight and load it themselves.

Column-parallel layers split output features: every rank sees the whole input and makes its own
part of the output. Row-parallel layers split input features and sum over the group. The pair
(column, then row) needs one all-reduce; the scheme is Megatron-LM's (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel.groups import Placement
from parallel.partition import even_range, head_range, kv_head_range
from parallel.weight_formats import make_weight
from parallel.weights import WeightSlot, copy_shard


def parameter(placement: Placement, *shape: int) -> nn.Parameter:
    data = torch.empty(shape, dtype=placement.dtype, device=placement.device)
    return nn.Parameter(data, requires_grad=False)


class OutputPart(NamedTuple):
    """Output features that one stored weight makes: `total` on all ranks, `local` here."""

    name: str
    """Prefix of the slot; empty for a layer of one part."""
    total: int
    local: range


class ColumnParallelLinear(nn.Module):
    """[..., in_features] -> [..., local out_features]. The weight stacks the parts' local rows, so
    that several projections of one input are one matrix product."""

    def __init__(
        self, in_features: int, parts: Sequence[OutputPart], *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = tuple(parts)
        num_rows = sum(len(part.local) for part in parts)
        self.weight = make_weight(num_rows, in_features, placement=placement)
        self.bias = parameter(placement, num_rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.matmul(x, self.bias)

    def weight_slots(self) -> Iterator[WeightSlot]:
        start = 0
        for part in self.parts:
            rows = range(start, start + len(part.local))
            first_row = part.local.start
            prefix = f"{part.name}." if part.name else ""
            load = partial(self.weight.load, rows=rows, first_row=first_row)
            yield WeightSlot(f"{prefix}weight", (part.total, self.in_features), load)
            if self.bias is not None:
                bias = self.bias[rows.start : rows.stop]
                load = partial(copy_shard, bias, first_row=first_row)
                yield WeightSlot(f"{prefix}bias", (part.total,), load)
            start = rows.stop


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of equal size side by side (gate and up), each split evenly."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        names: Sequence[str],
        *,
        bias: bool,
        placement: Placement,
    ) -> None:
        group = placement.group
        local = even_range(out_features, group.rank, group.size, "output features")
        parts = [OutputPart(name, out_features, local) for name in names]
        super().__init__(in_features, parts, bias=bias, placement=placement)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections: output [..., (num_heads + 2 * num_kv_heads) * head_dim],
    counts local. Key and value heads are replicated when there are more ranks than heads."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        placement: Placement,
    ) -> None:
        group = placement.group
        heads = head_range(num_heads, group.rank, group.size)
        kv_heads = kv_head_range(num_kv_heads, group.rank, group.size)
        parts = [
            _head_part("q", num_heads, heads, head_dim),
            _head_part("k", num_kv_heads, kv_heads, head_dim),
            _head_part("v", num_kv_heads, kv_heads, head_dim),
        ]
        super().__init__(hidden_size, parts, bias=bias, placement=placement)
        self.num_heads = len(heads)
        self.num_kv_heads = len(kv_heads)


def _head_part(name: str, num_heads: int, heads: range, head_dim: int) -> OutputPart:
    return OutputPart(
        name, num_heads * head_dim, range(heads.start * head_dim, heads.stop * head_dim)
    )


class RowParallelLinear(nn.Module):
    """[..., local in_features] -> [..., out_features], summed over the group."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.group = placement.group
        self.in_features = in_features
        self.local = even_range(in_features, self.group.rank, self.group.size, "input features")
        self.weight = make_weight(out_features, len(self.local), placement=placement)
        self.bias = parameter(placement, out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.group.all_reduce(self.weight.matmul(x))
        return out if self.bias is None else out + self.bias  # once, not once per rank

    def weight_slots(self) -> Iterator[WeightSlot]:
        num_rows = self.weight.out_features
        load = partial(self.weight.load, rows=range(num_rows), first_column=self.local.start)
        yield WeightSlot("weight", (num_rows, self.in_features), load)
        if self.bias is not None:
            yield WeightSlot("bias", (num_rows,), partial(copy_shard, self.bias))
