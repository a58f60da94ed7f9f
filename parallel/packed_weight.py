"""A loaded weight in the order that the CPU kernels want; takes the place of the reference.

The numbers are those of the reference, bit for bit. Products round the other way round: quantised
formats round activations to 8 bits per group and multiply integers, where the reference dequantises
the weights (csrc/matmul.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from cpu_kernels.matmul import Format, Matrix, pack_groups, pack_words, packed_rows
from parallel.quantization import Groups, dequantize, unpack_int4
from parallel.weight_formats import DenseWeight, Int4Weight, Int8Weight, Weight
from parallel.weights import StoredTensor

_INT8_SHIFT = 128
_DENSE_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


class PackedWeight(Weight):
    """Reuses the memory of `source`, which must not be used any more. `num_threads` None: as many
    as torch."""

    words: Tensor
    scales: Tensor | None
    minimums: Tensor | None

    def __init__(
        self, source: Weight, library: ctypes.CDLL, *, num_threads: int | None = None
    ) -> None:
        super().__init__(source.out_features, source.in_features)
        assert can_pack(source), f"{type(source).__name__} cannot be packed"
        self._library = library
        self._num_threads = num_threads
        scales = minimums = None
        if isinstance(source, DenseWeight):
            self._format, self.dtype = _DENSE_FORMATS[source.values.dtype], source.values.dtype
            words = source.values.data
        elif isinstance(source, Int8Weight):
            self._format, self.dtype = Format.INT8, source.dtype
            words, scales = source.codes.view(torch.uint8), source.scales
            words ^= _INT8_SHIFT  # unsigned: code + 128
        else:
            assert isinstance(source, Int4Weight)
            self._format, self.dtype = Format.INT4, source.dtype
            words, scales, minimums = source.packed, source.scales, source.minimums
        self.register_buffer("words", pack_words(words))
        self.register_buffer("scales", None if scales is None else pack_groups(scales))
        self.register_buffer("minimums", None if minimums is None else pack_groups(minimums))
        self.matrix = Matrix(
            self._format,
            self.out_features,
            self.in_features,
            words=self.words,
            scales=self.scales,
            minimums=self.minimums,
        )

    def load(
        self, stored: StoredTensor, rows: range, *, first_row: int = 0, first_column: int = 0
    ) -> None:
        raise AssertionError("a packed weight is loaded already")

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        num_threads = self._num_threads or torch.get_num_threads()
        return self.matrix.matmul(self._library, x, bias, num_threads=num_threads)

    def rows(self, indices: Tensor) -> Tensor:
        words = packed_rows(self.words, indices)
        if self.scales is None:
            return words.view(self.dtype)
        scales = packed_rows(self.scales, indices)
        if self.minimums is None:
            codes = words.view(torch.uint8).short() - _INT8_SHIFT
            return dequantize(Groups(codes, scales)).to(self.dtype)
        codes = unpack_int4(words.view(torch.uint8))
        minimums = packed_rows(self.minimums, indices)
        return dequantize(Groups(codes, scales, minimums)).to(self.dtype)


def can_pack(weight: Weight) -> bool:
    """Whether the kernels have its format: rows of whole 4-byte words, on the CPU."""
    if isinstance(weight, DenseWeight):
        values = weight.values
        whole = values.shape[1] * values.itemsize % 4 == 0
        return values.device.type == "cpu" and values.dtype in _DENSE_FORMATS and whole
    return isinstance(weight, Int8Weight | Int4Weight) and weight.scales.device.type == "cpu"


class HasModules(Protocol):
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


def pack_weights(
    model: HasModules, library: ctypes.CDLL, *, num_threads: int | None = None
) -> None:
    """Replace every weight of a loaded model that the kernels can multiply with; one that two
    layers share stays shared."""
    packed: dict[Weight, PackedWeight] = {}
    for _, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Weight) and can_pack(child):
                if child not in packed:
                    packed[child] = PackedWeight(child, library, num_threads=num_threads)
                setattr(module, name, packed[child])
