"""A rank's place in its worker, as layers and runner see it: the group that shares its layers, the
stage of the pipeline that it is in. There is no default group: a group is an argument. `SingleRank`
needs no process group; parallel/collectives.py has the real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel.partition import layer_range


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
class PipelineStage:
    """Which run of the model's layers a rank holds. The first stage embeds, the last one has the
    final norm and the LM head."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Raises ConfigError when a stage would be empty."""
        return layer_range(num_layers, self.index, self.count)


WHOLE = PipelineStage()


class StageLink(Protocol):
    """Hidden states to the next stage and from the one before: between ranks of equal index in
    their tensor-parallel groups. Sent and received in the same order on both ends."""

    def send(self, hidden: Tensor) -> None:
        """Returns at once; `hidden` must not be written to any more."""
        ...

    def receive(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size], of the next step that was sent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of a worker: `group` are the ranks of its stage."""

    group: Group
    stage: PipelineStage = WHOLE
    link: StageLink | None = None
    """None where there is one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a layer's parameters live and which shard of them: layers pass it on unread."""

    group: Group
    stage: PipelineStage = WHOLE
    dtype: torch.dtype
    device: torch.device
    expert_parallel: bool = False
    """Each expert whole on one rank of the group."""
    quantization: str | None = None
    """Format of the matrices (parallel/weight_formats.py); None: in `dtype`, as all else is."""
