"""Stored tensors cut otherwise than in the file. Nothing is read before a layer reads it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from parallel.quantization import Groups
from parallel.weights import QuantizedTensor, StoredTensor


def split_rows(
    checkpoint: Mapping[str, StoredTensor], sizes: Mapping[str, Mapping[str, int]]
) -> dict[str, StoredTensor]:
    """`checkpoint` with some tensors replaced by the parts that they stack. `sizes`: part of such a
    tensor's name -> what each part has in its place, and how many rows, in their order. A tensor
    that has not the rows of all its parts stays whole, and will be reported as one too many."""
    split: dict[str, StoredTensor] = {}
    for name, stored in checkpoint.items():
        fused = next((fused for fused in sizes if fused in name), None)
        if fused is None or sum(sizes[fused].values()) != stored.shape[0]:
            split[name] = stored
            continue
        start = 0
        for part, num_rows in sizes[fused].items():
            split[name.replace(fused, part)] = row_slice(stored, range(start, start + num_rows))
            start += num_rows
    return split


def row_slice(stored: StoredTensor, rows: range) -> StoredTensor:
    """Those rows of `stored` as a tensor of their own, quantised if it is."""
    if isinstance(stored, QuantizedTensor):
        return QuantizedRowSlice(stored, rows)
    return RowSlice(stored, rows)


class RowSlice:
    def __init__(self, stored: StoredTensor, rows: range) -> None:
        self.shape = (len(rows), *stored.shape[1:])
        self._stored = stored
        self._first = rows.start

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        return self._stored.read(self._moved(rows), columns)

    def _moved(self, rows: slice) -> slice:
        return slice(self._first + rows.start, self._first + rows.stop)


class QuantizedRowSlice(RowSlice):
    """parallel.weights.QuantizedTensor."""

    def __init__(self, stored: QuantizedTensor, rows: range) -> None:
        super().__init__(stored, rows)
        self._quantized = stored
        self.bits = stored.bits

    def read_groups(self, rows: slice, columns: slice | None = None) -> Groups:
        return self._quantized.read_groups(self._moved(rows), columns)
