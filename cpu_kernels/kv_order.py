"""Tile order: how the CPU kernels keep the keys and values inside a KV block, and its way to and
from plain order, the canonical one.

Owns the meaning of "tiles16" (core/kv.py says for which layouts it can be). A head's slice of a
block is block_size rows of head_dim numbers in plain order; in tile order the same bytes are tiles
of 16 positions, with w = TILED_BYTES / itemsize (float32: 1, bfloat16: 2, int8: 4):

    keys    [head_dim/w, 16, w]    16 positions side by side, for query x keys
    values  [16/w, head_dim, w]    w positions side by side, for weights x values

so that a vector register loads 16 x w numbers that a kernel sums over w at once. A row's scale,
which int8 has behind its numbers, is behind all numbers of the tile: [16] float32. A tensor keeps
its plain shape in either order: sharing, copies and transfer move blocks without knowing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from core.kv import SCALE_BYTES, TILE_POSITIONS, TILED_BYTES


def key_rows(keys: Tensor) -> Tensor:
    """The numbers of keys in tile order, [..., block_size, row_size], by position: a view of them,
    so also to be written through, [..., block_size/16, 16, head_dim/w, w]."""
    width = TILED_BYTES // keys.itemsize
    numbers, _ = _tiles(keys)
    return numbers.view(*numbers.shape[:-1], -1, TILE_POSITIONS, width).transpose(-3, -2)


def value_rows(values: Tensor) -> Tensor:
    """The numbers of values in tile order, [..., block_size, row_size], by position: a view of
    them, so also to be written through, [..., block_size/16, 16/w, w, head_dim]."""
    width = TILED_BYTES // values.itemsize
    numbers, _ = _tiles(values)
    return numbers.view(*numbers.shape[:-1], TILE_POSITIONS // width, -1, width).transpose(-2, -1)


def scale_rows(side: Tensor) -> Tensor:
    """The scales of keys, or of values, in tile order, by position: a view as of the numbers,
    [..., block_size/16, 16, SCALE_BYTES], the last of them 0 where the dtype has no scale."""
    _, scales = _tiles(side)
    return scales.view(*scales.shape[:-1], TILE_POSITIONS, _scale_size(side))


def tile(plain: Tensor) -> Tensor:
    """A copy in tile order of [..., 2, num_blocks, num_kv_heads, block_size, row_size] in plain
    order, keys at 0, values at 1."""
    tiled = torch.empty_like(plain)
    for rows, part in _rows(tiled, plain):
        rows.copy_(part)
    return tiled


def untile(tiled: Tensor) -> Tensor:
    """A copy in plain order of what `tile` makes, of the same shape."""
    plain = torch.empty_like(tiled)
    for rows, part in _rows(tiled, plain):
        part.copy_(rows)
    return plain


def _rows(tiled: Tensor, plain: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of equal shape: the tiled ones by position, and the plain ones."""
    sides = zip((key_rows, value_rows), tiled.unbind(-5), plain.unbind(-5), strict=True)
    for by_position, tiled_side, rows in sides:
        head_dim = rows.shape[-1] - _scale_size(rows)
        numbers, scales = by_position(tiled_side), scale_rows(tiled_side)
        yield numbers, rows[..., :head_dim].view(numbers.shape)
        yield scales, rows[..., head_dim:].view(scales.shape)


def _tiles(side: Tensor) -> tuple[Tensor, Tensor]:
    """[..., block_size, row_size] -> the numbers and the scales of each tile, [..., block_size/16,
    16 * head_dim] and [..., block_size/16, 16 * scale size]."""
    *blocks, block_size, row_size = side.shape
    tiles = side.view(*blocks, block_size // TILE_POSITIONS, TILE_POSITIONS * row_size)
    end = TILE_POSITIONS * (row_size - _scale_size(side))
    return tiles[..., :end], tiles[..., end:]


def _scale_size(side: Tensor) -> int:
    """Of a row's numbers, how many its scale takes the place of."""
    return SCALE_BYTES if side.itemsize == 1 else 0
