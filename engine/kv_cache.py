"""The memory of one rank's KV blocks. Knows shapes and bytes, not who owns which block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.config import CacheConfig
from core.errors import ConfigError
from core.kv import SCALE_BYTES, KVLayout
from cpu_kernels.kv_dtype import KV_DTYPES
from engine.batch import BlockCopy

MIN_BLOCKS = 2


class KVCache:
    """Raises ConfigError when it cannot be had.

    `tensor` is [num_layers, 2, num_blocks, num_kv_heads, block_size, row_size]: keys at 0,
    values at 1, so that a block's head is one contiguous slice and gathering one index_select.
    A row is head_dim numbers, and its scale where the dtype has one (cpu_kernels/kv_dtype.py)."""

    def __init__(self, layout: KVLayout, config: CacheConfig, *, device: torch.device) -> None:
        storage = _storage(layout)
        self.layout = layout
        self.num_blocks = num_blocks_for(layout, config)
        shape = layout.shape(self.num_blocks)
        # Zeros, not empty: masked positions have weight 0, and 0 * NaN from old memory is NaN.
        # It also makes too large a cache fail now and not under load.
        try:
            self.tensor = torch.zeros(shape, dtype=storage, device=device)
        except RuntimeError as error:
            num_bytes = self.num_blocks * layout.bytes_per_block
            raise ConfigError(
                f"a KV cache of {self.num_blocks} blocks ({num_bytes} bytes) does not fit into "
                f"the memory of {device}"
            ) from error

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Keys and values of all layers, from each source block to its target."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.tensor.device).unbind(1)
            self.tensor.index_copy_(2, targets, self.tensor.index_select(2, sources))

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero them: before a block that holds NaN is given to anyone else."""
        if block_ids:
            index = torch.tensor(block_ids, device=self.tensor.device)
            self.tensor.index_fill_(2, index, 0)


def _storage(layout: KVLayout) -> torch.dtype:
    """Of the tensor. Raises ConfigError where a row's scale would not be aligned."""
    kv_dtype = KV_DTYPES[layout.dtype]
    if kv_dtype.is_scaled and layout.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"a KV cache in {layout.dtype} needs a head_dim divisible by {SCALE_BYTES}; "
            f"this model's is {layout.head_dim}"
        )
    return kv_dtype.storage


def num_blocks_for(layout: KVLayout, config: CacheConfig) -> int:
    """Raises ConfigError when `memory_bytes` does not hold a usable cache."""
    if config.num_blocks is not None:
        return config.num_blocks
    num_blocks = config.memory_bytes // layout.bytes_per_block
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{config.memory_bytes} bytes of KV cache are too few: a block takes "
            f"{layout.bytes_per_block} bytes, and at least {MIN_BLOCKS} are needed"
        )
    return num_blocks
