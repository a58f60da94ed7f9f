"""How a layer gets its shard of a stored tensor: it names slots, a loader fills them.

The layer knows which rows and columns it holds, the stored tensor knows how to decode itself, the
loader (engine/weights) knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from parallel.quantization import Groups

CHUNK_BYTES = 4 << 20
"""Decoded bytes held at a time while a parameter is filled: peak memory stays near the model's."""


class StoredTensor(Protocol):
    """One tensor of a checkpoint, on disk until it is read. One or two dims."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """The part as a dense tensor of any float dtype. `columns` only for two dims."""
        ...


@runtime_checkable
class QuantizedTensor(StoredTensor, Protocol):
    """A stored tensor that is quantised in groups already, and can be taken as it is."""

    @property
    def bits(self) -> int:
        """8: codes and scales. 4: codes, scales and minimums."""
        ...

    def read_groups(self, rows: slice, columns: slice | None = None) -> Groups:
        """The part without a rounding. `columns` begins and ends between groups."""
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
    for piece in pieces(target.shape[0], target.shape[1], stored, first_row, first_column):
        target[piece.target].copy_(stored.read(piece.rows, piece.columns))


class Piece(NamedTuple):
    """Some rows of a shard and where they are stored."""

    target: slice
    rows: slice
    columns: slice | None


def pieces(
    num_rows: int, num_columns: int, stored: StoredTensor, first_row: int, first_column: int
) -> Iterator[Piece]:
    """The part of `stored` of that shape that begins at (first_row, first_column), a few rows at a
    time."""
    width = stored.shape[1]
    columns = None if width == num_columns else slice(first_column, first_column + num_columns)
    step = max(1, CHUNK_BYTES // (width * torch.float32.itemsize))
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        yield Piece(slice(start, end), slice(first_row + start, first_row + end), columns)
