"""Hidden states from one stage of a pipeline to the next, over gloo.

The ranks that stand at the same place of their stages share one group, whose ranks are the stages:
only neighbours talk in it, but all meet at once, in one store, and a stage that is gone ends the
worker whichever of the others it spoke to.

Nothing in a message says which step it is of: the two ends count on the same steps in the same
order. So a rank whose step has failed halfway must not go on.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from core.errors import RankLostError
from parallel.rendezvous import Store, gloo_backend

_TAG = 0


class PipelineLink:
    """A StageLink (parallel.groups) on the CPU; the group's ranks are the stages. One thread at a
    time uses it. What fails is a RankLostError: a dead neighbour is noticed at once, a silent one
    after the group's own timeout."""

    def __init__(self, backend: Any, *, hidden_size: int, dtype: torch.dtype) -> None:
        self._backend = backend
        self._stage: int = backend.rank()
        self._max_unread: int = backend.size()  # a step per stage is under way
        self._unread: deque[tuple[Any, Tensor]] = deque()
        self._hidden_size = hidden_size
        self._dtype = dtype

    @classmethod
    def join(
        cls,
        store: Store,
        stage: int,
        num_stages: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        host: str,
        timeout_s: float,
    ) -> PipelineLink:
        """Blocks until all stages are here; `store` serves no other group. Raises RankLostError
        when they are not in time."""
        try:
            backend = gloo_backend(store, stage, num_stages, host=host, timeout_s=timeout_s)
        except RuntimeError as error:
            raise RankLostError(f"{num_stages} pipeline stages did not meet in time") from error
        return cls(backend, hidden_size=hidden_size, dtype=dtype)

    def send(self, hidden: Tensor) -> None:
        """Waits only when the next stage is as many steps behind as there are stages. gloo reads
        the memory when the other end asks for it: until then tensor and operation live here."""
        shape = (len(hidden), self._hidden_size)
        assert (hidden.shape, hidden.dtype) == (shape, self._dtype), f"{hidden.shape} for {shape}"
        hidden = hidden.contiguous()
        try:
            if len(self._unread) == self._max_unread:
                self._unread.popleft()[0].wait()
            work = self._backend.send([hidden], self._stage + 1, _TAG)
        except RuntimeError as error:
            raise _lost(self._stage + 1) from error
        self._unread.append((work, hidden))

    def receive(self, num_tokens: int) -> Tensor:
        hidden = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype)
        try:
            self._backend.recv([hidden], self._stage - 1, _TAG).wait()
        except RuntimeError as error:
            raise _lost(self._stage - 1) from error
        return hidden


def _lost(stage: int) -> RankLostError:
    return RankLostError(f"pipeline stage {stage} is gone, or silent for too long")
