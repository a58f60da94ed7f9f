"""What moves between two layouts, and in which messages. Pure: both ends compute the same.

Only equal layouts so far. Unequal TP, PP or block size become pieces (layer range x head range x
block pairs) here, from the same `parallel.partition` that shards the weights.
"""

from __future__ import annotations

from core.kv import KVLayout


def check_compatible(src: KVLayout, dst: KVLayout) -> str | None:
    """Why blocks of `src` cannot become blocks of `dst`, with both values; None when they can."""
    difference = src.difference(dst)
    return difference and f"KV layouts differ: {difference}"


def plan_messages(num_blocks: int, bytes_per_block: int, max_message_bytes: int) -> list[range]:
    """Index ranges of the blocks of each message, in order; a message holds at least one block."""
    step = max(1, max_message_bytes // bytes_per_block)
    return [range(i, min(i + step, num_blocks)) for i in range(0, num_blocks, step)]
