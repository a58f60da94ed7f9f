"""What moves between two layouts, and in which messages. Pure: both ends compute the same.

Only layouts that are equal but for their inner order, so far. Unequal TP, PP or block size become
pieces (layer range x head range x block pairs) here, from the same `parallel.partition` that shards
the weights.
"""

from __future__ import annotations

from dataclasses import replace

from core.kv import KVLayout


def check_compatible(src: KVLayout, dst: KVLayout) -> str | None:
    """Why blocks of `src` cannot become blocks of `dst`, with both values; None when they can."""
    difference = replace(src, inner_order=dst.inner_order).difference(dst)
    if difference is not None:
        return f"KV layouts differ: {difference}"
    fault = src.order_fault() or dst.order_fault()
    return fault and f"KV layout is refused: {fault}"


def message_layout(src: KVLayout, dst: KVLayout) -> KVLayout:
    """What moves from `src` to `dst`: blocks in the order of both, or else in plain order, so that
    each side need know no order but that and its own."""
    return dst if src.inner_order == dst.inner_order else replace(dst, inner_order="plain")


def plan_messages(num_blocks: int, bytes_per_block: int, max_message_bytes: int) -> list[range]:
    """Index ranges of the blocks of each message, in order; a message holds at least one block."""
    step = max(1, max_message_bytes // bytes_per_block)
    return [range(i, min(i + step, num_blocks)) for i in range(0, num_blocks, step)]
