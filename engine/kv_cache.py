"""The memory of one rank's KV blocks. Knows shapes and bytes, not who owns which block."""

from __future__ import annotations

import torch

from core.config import CacheConfig
from core.errors import ConfigError
from core.kv import KVLayout

MIN_BLOCKS = 2


class KVCache:
    """Raises ConfigError when it cannot be had.

    `tensor` is [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]: keys at 0,
    values at 1, so that a block's head is one contiguous slice and gathering one index_select."""

    def __init__(self, layout: KVLayout, config: CacheConfig, *, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks_for(layout, config)
        shape = (
            layout.num_layers,
            2,
            self.num_blocks,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        # Zeros, not empty: masked positions have weight 0, and 0 * NaN from old memory is NaN.
        # It also makes too large a cache fail now and not under load.
        try:
            self.tensor = torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=device)
        except RuntimeError as error:
            num_bytes = self.num_blocks * layout.bytes_per_block
            raise ConfigError(
                f"a KV cache of {self.num_blocks} blocks ({num_bytes} bytes) does not fit into "
                f"the memory of {device}"
            ) from error


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
