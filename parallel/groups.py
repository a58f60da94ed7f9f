"""The ranks that share one layer, as the layers see them. There is no default group: a group is an
argument. `SingleRank` needs no process group; parallel/collectives.py has the real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """Collectives over the ranks of one tensor-parallel group. All ranks call in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, on every rank. May reuse the memory of `tensor`."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape]: the tensors of all ranks, which have equal shapes."""
        ...


class SingleRank:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a layer's parameters live and which shard of them: models pass it on unread."""

    group: Group
    dtype: torch.dtype
    device: torch.device
    quantization: str | None = None
    """Format of the matrices (parallel/weight_formats.py); None: in `dtype`, as all else is."""
