"""KV blocks as two processes talk about them: layout, handle, pull. No tensors here.

A handle is a promise: these blocks, of this incarnation, for this attempt, until it is released or
its lease ends. The owner checks every field before it serves (see kv_transfer/sender.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from core.prefix import BlockHash

KV_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
"""What a cache can hold -> bytes of a number. Those of one byte have a scale per row; fp8 is e4m3.
See cpu_kernels/kv_dtype.py."""
SCALE_BYTES = 4
INNER_ORDERS = ("plain", "tiles16")
"""How a head's slice of a block can be ordered; for the second one see cpu_kernels/kv_order.py."""
TILE_POSITIONS = 16
TILED_BYTES = 4
"""Of neighbouring numbers in a tile: one float32, two bfloat16 or four int8."""
TILED_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What one rank's KV cache looks like, and which of the model's layers and kv heads it holds.
    kv_transfer/plan.py says what can move between two.

    A block holds `block_size` positions of every local kv head of a layer, head-major, keys and
    values apart: [num_kv_heads, block_size, row_bytes] bytes each, when in plain order.
    """

    model: str
    """Fingerprint of architecture, weights and arithmetic (dtype, quantisation), so that neither
    equal shapes of two models nor two roundings of one model mix."""
    dtype: str
    """One of KV_DTYPE_BYTES."""
    block_size: int
    first_layer: int
    num_layers: int
    first_kv_head: int = 0
    """Of all the model's kv heads, as `first_layer` is of all layers."""
    num_kv_heads: int
    head_dim: int
    inner_order: str = "plain"
    """Order inside a head's slice, one of INNER_ORDERS: the backend's choice."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the key, or the value, of one position and head: its numbers, then its scale."""
        width = KV_DTYPE_BYTES[self.dtype]
        return self.head_dim * width + (SCALE_BYTES if width == 1 else 0)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all local layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.row_bytes

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def kv_heads(self) -> range:
        return range(self.first_kv_head, self.first_kv_head + self.num_kv_heads)

    @property
    def extent(self) -> str:
        """Which layers and kv heads, for messages."""
        return (
            f"layers {self.layers.start} to {self.layers.stop - 1}, "
            f"kv heads {self.kv_heads.start} to {self.kv_heads.stop - 1}"
        )

    @property
    def is_tiled(self) -> bool:
        return self.inner_order != "plain"

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Of a tensor of blocks, keys at 0, values at 1: [num_layers, 2, num_blocks, num_kv_heads,
        block_size, row_size], in either inner order."""
        row_size = self.row_bytes // KV_DTYPE_BYTES[self.dtype]
        return (self.num_layers, 2, num_blocks, self.num_kv_heads, self.block_size, row_size)

    def holds(self, other: KVLayout) -> bool:
        """All layers and kv heads of `other`."""
        pairs = ((self.layers, other.layers), (self.kv_heads, other.kv_heads))
        return all(a.start <= b.start and b.stop <= a.stop for a, b in pairs)

    def difference(self, other: KVLayout, names: Iterable[str] | None = None) -> str | None:
        """Human-readable first difference to `other`, of the fields `names` or of all, None when
        equal."""
        for name in names or (field.name for field in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} differs: {mine} here, {theirs} there"
        return None

    def fault(self) -> str | None:
        """Why no cache has this layout, whoever says so; None when one can."""
        if self.dtype not in KV_DTYPE_BYTES:
            return f"dtype {self.dtype!r} is none of {', '.join(KV_DTYPE_BYTES)}"
        for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}, not 1 or more"
        for name in ("first_layer", "first_kv_head"):
            if getattr(self, name) < 0:
                return f"{name} is {getattr(self, name)}, not 0 or more"
        if KV_DTYPE_BYTES[self.dtype] == 1 and self.head_dim % SCALE_BYTES:
            return (
                f"dtype {self.dtype} needs head_dim in steps of {SCALE_BYTES}, not {self.head_dim}"
            )
        return self.order_fault()

    def order_fault(self) -> str | None:
        """Why no block of this shape and dtype has this `inner_order`, None when one can."""
        if self.inner_order not in INNER_ORDERS:
            return f"inner_order {self.inner_order!r} is none of {', '.join(INNER_ORDERS)}"
        if self.inner_order == "plain" or (
            self.dtype in TILED_DTYPES
            and self.block_size % TILE_POSITIONS == 0
            and self.head_dim * KV_DTYPE_BYTES[self.dtype] % TILED_BYTES == 0
        ):
            return None
        return (
            f"inner_order {self.inner_order} needs dtype {' or '.join(TILED_DTYPES)}, "
            f"block_size in steps of {TILE_POSITIONS} and rows in steps of {TILED_BYTES} bytes, "
            f"not {self.dtype}, {self.block_size} and {self.head_dim} numbers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRef:
    """One block at one moment. `generation` grows each time the block is given out anew."""

    block_id: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHandle:
    """Leased KV of positions [0, num_tokens) of one request, in position order.

    `blocks[i]` holds positions [i*block_size, (i+1)*block_size); the last one may be partial.
    `block_hashes` covers the full blocks. `lease_s` is the time left when the handle was made; the
    holder renews it, the owner's monotonic clock decides.
    """

    handle_id: str
    request_id: str
    attempt: int
    worker: str
    """Name of the owner."""
    incarnation: str
    """Random per process start: a restarted worker at the same address honours nothing old."""
    address: str
    """host:port of the owner's gRPC service."""
    layouts: tuple[KVLayout, ...]
    """Of all its ranks; block ids are the same on each."""
    blocks: tuple[BlockRef, ...]
    block_hashes: tuple[BlockHash, ...]
    num_tokens: int
    lease_s: float

    @property
    def block_size(self) -> int:
        return self.layouts[0].block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOffer:
    """Receiver's invitation to a two-rank group: the sender is rank 0, the receiver rank 1."""

    channel_id: str
    """Fresh for every group, never reused, so an aborted group cannot be mixed up with its heir.
    What is before its first dot names the rank that receives."""
    source: int
    """The owner's rank that is to send."""
    backend: str
    """gloo or nccl."""
    store_host: str
    store_port: int
    layout: KVLayout
    """Of the messages: see kv_transfer/plan.Piece."""
    incarnation: str
    """Owner the receiver believes it talks to; a restarted owner refuses."""
    max_message_bytes: int
    """The receiver cuts transfers into messages of this size; the sender must do the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Ask for what a handle covers from `first_position` on, over an open channel. The receive is
    posted before this is sent.

    The receiver already has what is before; `blocks` are the handle's from the one that holds
    `first_position` to the last.
    """

    handle_id: str
    request_id: str
    attempt: int
    incarnation: str
    channel_id: str
    transfer_id: int
    """Counts up per channel: both ends run transfers of a channel in this order."""
    first_position: int
    blocks: tuple[BlockRef, ...]
    block_hashes: tuple[BlockHash, ...]
