"""Attention over paged KV in tile order (kv_order.py): the typed face of csrc/attention.h.

Knows tensors and sizes of one layer and one step, not where blocks come from.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_kernels.library import check

HEAD_DIM_STEP = 16
"""Dimensions of a head are taken in whole vectors."""
MAX_HEAD_DIM = 512
"""csrc/kv_words.h's."""
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Of a cache's tensor: csrc/kv_words.h's KVType."""


class ShapeStruct(ctypes.Structure):
    """csrc/attention.h's AttentionShape."""

    _fields_ = (
        ("heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class RowsStruct(ctypes.Structure):
    """csrc/kernels.cpp's StepRows."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class AttentionStruct(ctypes.Structure):
    """csrc/kernels.cpp's AttentionInputs."""

    _fields_ = (
        ("shape", ShapeStruct),
        ("window", ctypes.c_int),
        ("num_sequences", ctypes.c_int),
        ("table_width", ctypes.c_int),
        ("query_lens", ctypes.c_void_p),
        ("num_computed", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int),
        ("is_bfloat16", ctypes.c_int),
        ("query", RowsStruct),
        ("key", RowsStruct),
        ("value", RowsStruct),
        ("out", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("kv_type", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShares:
    """What each sequence has in a step: its queries are rows of the step, one sequence's after
    another's."""

    query_lens: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    """Positions before the first query."""
    block_tables: NDArray[np.int32]
    """[num_sequences, width]."""


def can_attend(head_dim: int) -> bool:
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM


def paged_attention(
    library: ctypes.CDLL,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_layer: Tensor,
    shares: SequenceShares,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    num_threads: int,
) -> Tensor:
    """query [T, H, D], key and value [T, K, D], float32 or bfloat16; kv_layer [2, num_blocks, K,
    block_size, row] in tiles16 order, of KV_TYPES, which is written to -> [T, H, D] in query's
    dtype. A row's result depends on nothing but its own sequence, bit for bit: not on chunking,
    neighbours or threads."""
    num_tokens, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = kv_layer.shape
    assert query.dtype == key.dtype == value.dtype, f"{query.dtype}, {key.dtype}, {value.dtype}"
    query, key, value = map(_whole_rows, (query, key, value))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    inputs = AttentionStruct(
        ShapeStruct(heads, kv_heads, head_dim, block_size, scale, softcap or 0.0),
        window or 0,
        *shares.block_tables.shape,
        shares.query_lens.ctypes.data,
        shares.num_computed.ctypes.data,
        shares.block_tables.ctypes.data,
        num_tokens,
        query.dtype == torch.bfloat16,
        *(RowsStruct(rows.data_ptr(), rows.stride(0)) for rows in (query, key, value)),
        out.data_ptr(),
        kv_layer[0].data_ptr(),
        kv_layer[1].data_ptr(),
        KV_TYPES[kv_layer.dtype],
    )
    check(library.ts_attention(ctypes.byref(inputs), num_threads))
    return out


def _whole_rows(rows: Tensor) -> Tensor:
    """[T, heads, D] with the numbers of a row side by side; rows may be parts of wider ones."""
    _, _, head_dim = rows.shape
    return rows if rows.stride()[1:] == (head_dim, 1) else rows.contiguous()
