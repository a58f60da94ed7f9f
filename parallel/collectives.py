"""Groups over torch.distributed. Each owns its process group; the default group is never made."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from parallel.rendezvous import Store, gloo_backend, rank_lost


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Backend(Protocol):
    """What torch's backends can do and their type stubs do not say."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def allreduce(self, tensors: list[Tensor]) -> _Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...


class DistributedGroup:
    """A Group (parallel.groups) over one backend of torch.distributed. Raises RankLostError when
    one of the others is gone, or has not come within the group's timeout."""

    def __init__(self, backend: _Backend) -> None:
        self._backend = backend
        self.rank = backend.rank()
        self.size = backend.size()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        try:
            self._backend.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise rank_lost(error) from None
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        try:
            self._backend.allgather([list(gathered)], [tensor.contiguous()]).wait()
        except RuntimeError as error:
            raise rank_lost(error) from None
        return gathered


def gloo_group(
    store: Store, rank: int, size: int, timeout_s: float, *, host: str = "127.0.0.1"
) -> DistributedGroup:
    """Joins the group that meets in `store`, which serves no other group; returns when all ranks
    have joined. `host`: of this rank's own sockets."""
    backend = gloo_backend(store, rank, size, host=host, timeout_s=timeout_s)
    group = DistributedGroup(cast(_Backend, backend))
    # A rank that is done connecting and leaves at once breaks those that still connect: meet first.
    group.all_reduce(torch.zeros(1))
    return group
