"""Groups over torch.distributed. Each owns its process group; the default group is never made."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # public


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Backend(Protocol):
    """What torch's backends can do and their type stubs do not say."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def allreduce(self, tensors: list[Tensor]) -> _Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...


class DistributedGroup:
    """A Group (parallel.groups) over one backend of torch.distributed."""

    def __init__(self, backend: _Backend) -> None:
        self._backend = backend
        self.rank = backend.rank()
        self.size = backend.size()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        self._backend.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._backend.allgather([list(gathered)], [tensor.contiguous()]).wait()
        return gathered


def gloo_group(store: Store, rank: int, size: int, timeout_s: float) -> DistributedGroup:
    """Joins the group that meets in `store`, which serves no other group; returns when all ranks
    have joined."""
    backend = ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    group = DistributedGroup(cast(_Backend, backend))
    # A rank that is done connecting and leaves at once breaks those that still connect: meet first.
    group.all_reduce(torch.zeros(1))
    return group
