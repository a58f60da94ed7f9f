"""The matrix of a linear layer or an embedding as an object that the layer owns.

A layer says which rows and columns are its own and asks for products and rows; the weight owns how
the numbers are held and multiplied. So another format, or a faster backend with a packing of its
own, is one more class in `make_weight`: no layer and no model file changes.

The quantised formats here are the plain reference: they dequantise some rows at a time into the
activations' dtype and multiply those. Exact and small, not fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.errors import ConfigError, ModelLoadError
from parallel.groups import Placement
from parallel.quantization import (
    GROUP_SIZE,
    Groups,
    dequantize,
    pack_int4,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)
from parallel.weights import QuantizedTensor, StoredTensor, copy_shard, pieces

CHUNK_ELEMENTS = 1 << 20
"""Dequantised weights that exist at a time in a product: 4 MiB in float32."""


class Weight(nn.Module, ABC):
    """[out_features, in_features] on one rank; zero until loaded."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features

    @abstractmethod
    def load(
        self, stored: StoredTensor, rows: range, *, first_row: int = 0, first_column: int = 0
    ) -> None:
        """Fill own `rows` from the stored rows and columns that begin at (first_row,
        first_column). Raises ModelLoadError when the format cannot hold the numbers."""

    @abstractmethod
    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in_features] -> [..., out_features], both in the placement's dtype."""

    @abstractmethod
    def rows(self, indices: Tensor) -> Tensor:
        """[n] int64 -> [n, in_features] in the placement's dtype."""


def make_weight(out_features: int, in_features: int, *, placement: Placement) -> Weight:
    """In the placement's format. Raises ConfigError when the shape does not suit it."""
    return _FORMATS[placement.quantization](out_features, in_features, placement)


class DenseWeight(Weight):
    """In the activations' dtype."""

    def __init__(self, out_features: int, in_features: int, placement: Placement) -> None:
        super().__init__(out_features, in_features)
        values = torch.zeros(
            (out_features, in_features), dtype=placement.dtype, device=placement.device
        )
        self.values = nn.Parameter(values, requires_grad=False)

    def load(
        self, stored: StoredTensor, rows: range, *, first_row: int = 0, first_column: int = 0
    ) -> None:
        copy_shard(self.values[rows.start : rows.stop], stored, first_row, first_column)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.values, bias)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.values)


class QuantizedWeight(Weight):
    """Codes in groups of GROUP_SIZE input features. What is stored in the same format is taken as
    it is; everything else is rounded once, from float32."""

    bits: ClassVar[int]

    def __init__(self, out_features: int, in_features: int, placement: Placement) -> None:
        super().__init__(out_features, in_features)
        if in_features % GROUP_SIZE:
            raise ConfigError(
                f"int{self.bits} weights are made in groups of {GROUP_SIZE} input features; a "
                f"layer of this model has {in_features} on each rank"
            )
        self.dtype = placement.dtype
        self._device = placement.device

    def load(
        self, stored: StoredTensor, rows: range, *, first_row: int = 0, first_column: int = 0
    ) -> None:
        for piece in pieces(len(rows), self.in_features, stored, first_row, first_column):
            if isinstance(stored, QuantizedTensor) and stored.bits == self.bits:
                groups = stored.read_groups(piece.rows, piece.columns)
            else:
                groups = self._quantize(stored.read(piece.rows, piece.columns).float())
            _check_range(groups)
            start, end = rows.start + piece.target.start, rows.start + piece.target.stop
            self._put(slice(start, end), groups)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x.new_empty((*x.shape[:-1], self.out_features))
        step = max(1, CHUNK_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            part = slice(start, start + step)
            out[..., part] = F.linear(x, self._dense(part), None if bias is None else bias[part])
        return out

    def rows(self, indices: Tensor) -> Tensor:
        return self._dense(indices)

    def _dense(self, rows: slice | Tensor) -> Tensor:
        return dequantize(self._get(rows)).to(self.dtype)

    def _zeros(self, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((self.out_features, columns), dtype=dtype, device=self._device)

    @abstractmethod
    def _quantize(self, values: Tensor) -> Groups: ...

    @abstractmethod
    def _put(self, rows: slice, groups: Groups) -> None: ...

    @abstractmethod
    def _get(self, rows: slice | Tensor) -> Groups: ...


class Int8Weight(QuantizedWeight):
    """Symmetric: 8.5 bits per weight."""

    bits = 8
    codes: Tensor
    scales: Tensor

    def __init__(self, out_features: int, in_features: int, placement: Placement) -> None:
        super().__init__(out_features, in_features, placement)
        self.register_buffer("codes", self._zeros(in_features, torch.int8))
        self.register_buffer("scales", self._zeros(in_features // GROUP_SIZE, torch.float16))

    def _quantize(self, values: Tensor) -> Groups:
        return quantize_int8(values)

    def _put(self, rows: slice, groups: Groups) -> None:
        self.codes[rows] = groups.codes
        self.scales[rows] = groups.scales

    def _get(self, rows: slice | Tensor) -> Groups:
        return Groups(self.codes[rows], self.scales[rows])


class Int4Weight(QuantizedWeight):
    """Scale and minimum, two codes per byte: 5 bits per weight."""

    bits = 4
    packed: Tensor
    scales: Tensor
    minimums: Tensor

    def __init__(self, out_features: int, in_features: int, placement: Placement) -> None:
        super().__init__(out_features, in_features, placement)
        self.register_buffer("packed", self._zeros(in_features // 2, torch.uint8))
        self.register_buffer("scales", self._zeros(in_features // GROUP_SIZE, torch.float16))
        self.register_buffer("minimums", self._zeros(in_features // GROUP_SIZE, torch.float16))

    def _quantize(self, values: Tensor) -> Groups:
        return quantize_int4(values)

    def _put(self, rows: slice, groups: Groups) -> None:
        assert groups.minimums is not None, "4-bit groups have minimums"
        self.packed[rows] = pack_int4(groups.codes)
        self.scales[rows] = groups.scales
        self.minimums[rows] = groups.minimums

    def _get(self, rows: slice | Tensor) -> Groups:
        return Groups(unpack_int4(self.packed[rows]), self.scales[rows], self.minimums[rows])


_FORMATS: Mapping[str | None, Callable[[int, int, Placement], Weight]] = {
    None: DenseWeight,
    "int8": Int8Weight,
    "int4": Int4Weight,
}


def _check_range(groups: Groups) -> None:
    for values in (groups.scales, groups.minimums):
        if values is not None and not values.isfinite().all():
            raise ModelLoadError("a weight is not finite or too large for a scale in float16")
