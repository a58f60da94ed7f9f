"""Products with packed matrices: how a matrix is packed, and the kernel's typed face.

Packing only moves words of 4 bytes (csrc/matmul.h says where to), so it is done in place and undone
exactly. Knows formats and shapes, not where numbers come from.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from cpu_kernels.library import check

PANEL_ROWS = 32


class Format(IntEnum):
    """csrc/matmul.h's."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class MatrixStruct(ctypes.Structure):
    """csrc/matmul.h's Weight."""

    _fields_ = (
        ("format", ctypes.c_int),
        ("out_features", ctypes.c_int),
        ("in_features", ctypes.c_int),
        ("words", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
    )


def pack_words(matrix: Tensor) -> Tensor:
    """[rows, columns] contiguous, rows of whole 4-byte words -> the same in panel order, in place
    where the rows fill whole panels, else in new memory with rows of zeros added:
    [panels, words of a row, PANEL_ROWS] int32."""
    return _pack(matrix, torch.int32)


def pack_groups(values: Tensor) -> Tensor:
    """Scales or minimums, [rows, groups] float16 -> [panels, groups, PANEL_ROWS] float16; in place
    as pack_words."""
    return _pack(values, torch.float16)


def _pack(matrix: Tensor, unit: torch.dtype) -> Tensor:
    rows = matrix.view(unit)
    if len(rows) % PANEL_ROWS:
        padded = rows.new_zeros(-(-len(rows) // PANEL_ROWS) * PANEL_ROWS, rows.shape[1])
        padded[: len(rows)] = rows
        rows = padded
    panels = rows.view(-1, rows.shape[1], PANEL_ROWS)
    for panel, rows_of_panel in zip(panels, rows.view(-1, PANEL_ROWS, rows.shape[1]), strict=True):
        panel.copy_(rows_of_panel.t().clone())  # contiguous() may be the same memory
    return panels


def packed_rows(packed: Tensor, indices: Tensor) -> Tensor:
    """Rows of what pack_words or pack_groups made: [n] int64 -> [n, units of a row]."""
    return packed[indices // PANEL_ROWS, :, indices % PANEL_ROWS]


class Matrix:
    """[out_features, in_features], packed. Holds the tensors that the kernel points into."""

    def __init__(
        self,
        format: Format,
        out_features: int,
        in_features: int,
        *,
        words: Tensor,
        scales: Tensor | None = None,
        minimums: Tensor | None = None,
    ) -> None:
        self.tensors = (words, scales, minimums)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in self.tensors)
        self.struct = MatrixStruct(format, out_features, in_features, *pointers)
        self._pointer = ctypes.byref(self.struct)

    def matmul(
        self, library: ctypes.CDLL, x: Tensor, bias: Tensor | None = None, *, num_threads: int
    ) -> Tensor:
        """[..., in_features] @ transposed -> [..., out_features] in x's dtype, float32 or bfloat16.
        Sums are float32, in the order of the inputs whatever the number of rows."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.struct.out_features))
        if bias is not None:
            bias = bias.float()
        failed = library.ts_matmul(
            self._pointer,
            ctypes.c_void_p(x.data_ptr()),
            x.numel() // self.struct.in_features,
            x.dtype == torch.bfloat16,
            None if bias is None else ctypes.c_void_p(bias.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            num_threads,
        )
        check(failed)
        return out
