"""Blocks scattered over a pool <-> one contiguous message.

kv is [num_layers, 2, num_blocks, num_kv_heads, block_size, row_size]; a message of n blocks is the
same with n in place of num_blocks, in the order of the block ids given. A row ends with its scale
where the dtype has one, so scales move with their numbers. The bytes stay as they are, unless the
message is to have another inner order than the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from cpu_kernels.kv_order import tile, untile

DIGEST_SIZE = 16


class StagingBuffer:
    """Memory that messages of one pool pass through; grows to the largest message seen."""

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv
        self._flat = torch.empty(0, dtype=kv.dtype, device=kv.device)

    def message(self, num_blocks: int) -> Tensor:
        """Contiguous memory for `num_blocks` blocks; valid until the next call."""
        num_layers, two, _, *block = self._kv.shape
        shape = torch.Size((num_layers, two, num_blocks, *block))
        if self._flat.numel() < shape.numel():
            self._flat = torch.empty(shape.numel(), dtype=self._kv.dtype, device=self._kv.device)
        return self._flat[: shape.numel()].view(shape)


@torch.inference_mode()
def gather_blocks(kv: Tensor, block_ids: Sequence[int], message: Tensor) -> None:
    torch.index_select(kv, 2, _index(kv, block_ids), out=message)


@torch.inference_mode()
def scatter_blocks(message: Tensor, kv: Tensor, block_ids: Sequence[int]) -> None:
    kv.index_copy_(2, _index(kv, block_ids), message)


@torch.inference_mode()
def reorder(message: Tensor, source: str, target: str) -> None:
    """From one inner order to the other (of core/kv.INNER_ORDERS), in place."""
    if source != target:
        message.copy_(tile(message) if source == "plain" else untile(message))


def _index(kv: Tensor, block_ids: Sequence[int]) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.int64, device=kv.device)


def digest(message: Tensor) -> bytes:
    """BLAKE2b of the message's bytes."""
    flat = message.detach().reshape(-1).view(torch.uint8).cpu()
    return blake2b(flat.numpy().data, digest_size=DIGEST_SIZE).digest()
