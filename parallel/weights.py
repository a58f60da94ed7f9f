"""How a layer gets its shard of a stored tensor: it names slots, a loader fills them.

The layer knows which rows and columns it holds, the stored tensor knows how to decode itself, the
loader (engine/weights) knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20
"""Decoded bytes held at a time while a parameter is filled: peak memory stays near the model's."""


class StoredTensor(Protocol):
    """One tensor of a checkpoint, on disk until it is read. One or two dims."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """The part as a dense tensor of any float dtype. `columns` only for two dims."""
        ...


class WeightSlot(NamedTuple):
    """A place for one stored tensor."""

    name: str
    """Relative to the layer."""
    shape: tuple[int, ...]
    """Of the whole stored tensor, not of the shard."""
    load: Callable[[StoredTensor], None]
    required: bool = True


@runtime_checkable
class HasWeightSlots(Protocol):
    def weight_slots(self) -> Iterable[WeightSlot]: ...


def copy_shard(
    target: Tensor, stored: StoredTensor, first_row: int = 0, first_column: int = 0
) -> None:
    """Fill `target` with the part of `stored` of its shape that begins at (first_row,
    first_column); converts to target's dtype, a few rows at a time."""
    if target.dim() == 1:
        target.copy_(stored.read(slice(first_row, first_row + target.shape[0])))
        return
    num_rows, num_columns = target.shape
    width = stored.shape[1]
    columns = None if width == num_columns else slice(first_column, first_column + num_columns)
    step = max(1, CHUNK_BYTES // (width * torch.float32.itemsize))
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        target[start:end].copy_(stored.read(slice(first_row + start, first_row + end), columns))
