"""Tile order: how the CPU kernels keep the keys and values inside a KV block, and its way to and
from plain order, the canonical one.

Owns the meaning of "tiles16" (core/kv.py says for which layouts it can be). A head's slice of a
block is [block_size, head_dim] numbers in plain order; in tile order the same bytes are tiles of 16
positions, with w = TILED_BYTES / itemsize (float32: 1, bfloat16: 2):

    keys    [block_size/16, head_dim/w, 16, w]    16 positions side by side, for query x keys
    values  [block_size/16, 16/w, head_dim, w]    w positions side by side, for weights x values

so that a vector register loads 16 x w numbers that a kernel sums over w at once. A tensor keeps its
plain shape in either order: sharing, copies and transfer move blocks without knowing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.kv import TILE_POSITIONS, TILED_BYTES


def key_rows(keys: Tensor) -> Tensor:
    """Keys in tile order, [..., block_size, head_dim], by position: a view of them, so also to be
    written through, [..., block_size/16, 16, head_dim/w, w]."""
    *blocks, block_size, head_dim = keys.shape
    width = TILED_BYTES // keys.itemsize
    shape = (block_size // TILE_POSITIONS, head_dim // width, TILE_POSITIONS, width)
    return keys.view(*blocks, *shape).transpose(-3, -2)


def value_rows(values: Tensor) -> Tensor:
    """Values in tile order, [..., block_size, head_dim], by position: a view of them, so also to be
    written through, [..., block_size/16, 16/w, w, head_dim]."""
    *blocks, block_size, head_dim = values.shape
    width = TILED_BYTES // values.itemsize
    shape = (block_size // TILE_POSITIONS, TILE_POSITIONS // width, head_dim, width)
    return values.view(*blocks, *shape).transpose(-2, -1)


def tile(plain: Tensor) -> Tensor:
    """A copy in tile order of [..., 2, num_blocks, num_kv_heads, block_size, head_dim] in plain
    order, keys at 0, values at 1."""
    tiled = torch.empty_like(plain)
    for rows, part in _rows(tiled, plain):
        rows.copy_(part.view(rows.shape))
    return tiled


def untile(tiled: Tensor) -> Tensor:
    """A copy in plain order of what `tile` makes, of the same shape."""
    plain = torch.empty_like(tiled)
    for rows, part in _rows(tiled, plain):
        part.view(rows.shape).copy_(rows)
    return plain


def _rows(tiled: Tensor, plain: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Of keys and of values: the tiled ones by position, and the plain ones."""
    tiled_keys, tiled_values = tiled.unbind(-5)
    keys, values = plain.unbind(-5)
    return (key_rows(tiled_keys), keys), (value_rows(tiled_values), values)
