"""What moves between two workers' KV caches, whatever their shapes, and in which messages. Pure:
both ends compute the same from the same layouts.

A worker is the tuple of its ranks' layouts; block ids are the same on all its ranks. Of each target
rank, every layer and kv head comes from one source rank: that is a piece, and its messages are a
stream of their own. A message holds *units*, blocks of the smaller of the two block sizes, in the
dtype with the shorter rows: blocks of a layout, therefore, like those of a cache (`Piece.layout`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

from core.errors import HandshakeRefusedError
from core.kv import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one source rank gives to one target rank."""

    source: int
    """Index of the rank in its worker."""
    target: int
    layout: KVLayout
    """Of the messages. Its layers and kv heads are those of the piece."""


def plan_pieces(sources: Sequence[KVLayout], targets: Sequence[KVLayout]) -> tuple[Piece, ...]:
    """All pieces between two workers, ordered by target. Every layer and head of a target is in
    exactly one of its pieces. Raises HandshakeRefusedError with the reason.

    Of several ranks that hold the same, the one gives that has to give least so far, targets taken
    in their order; the first of equals. So copies of a head share the work.
    """
    return _planned(tuple(sources), tuple(targets))


@lru_cache(maxsize=64)
def _planned(sources: tuple[KVLayout, ...], targets: tuple[KVLayout, ...]) -> tuple[Piece, ...]:
    if len({source.block_size for source in sources}) > 1:
        raise HandshakeRefusedError(
            "KV layouts differ: ranks of one worker have unequal block_size"
        )
    for source, target in product(sources, targets):
        if (reason := check_compatible(source, target)) is not None:
            raise HandshakeRefusedError(reason)
    pieces = []
    loads = [0] * len(sources)
    for index, target in enumerate(targets):
        for cell in _cells(sources, target):
            giver = min(_holders(sources, cell), key=loads.__getitem__)
            loads[giver] += cell.num_layers * cell.num_kv_heads
            layout = message_layout(sources[giver], cell)
            pieces.append(Piece(source=giver, target=index, layout=layout))
    return tuple(pieces)


def check_compatible(source: KVLayout, target: KVLayout) -> str | None:
    """Why rows of `source` cannot become rows of `target`, with both values; None when they can."""
    difference = source.difference(target, ("model", "head_dim"))
    if difference is not None:
        return f"KV layouts differ: {difference}"
    fault = source.fault() or target.fault()
    if fault is not None:
        return f"KV layout is refused: {fault}"
    sizes = source.block_size, target.block_size
    if max(sizes) % min(sizes):
        difference = source.difference(target, ("block_size",))
        return f"KV layouts differ: {difference}, and neither divides the other"
    return None


def check_messages(layout: KVLayout, messages: KVLayout) -> str | None:
    """Why messages of the layout that a receiver asks for cannot be made from a cache of `layout`,
    with both values; None when they can."""
    reason = check_compatible(layout, messages)
    if reason is not None:
        return reason
    if layout.block_size % messages.block_size:
        return f"KV messages are refused: {layout.difference(messages, ('block_size',))}"
    if not layout.holds(messages):
        return f"KV messages are refused: {layout.extent} here, {messages.extent} there"
    return None


def message_layout(source: KVLayout, target: KVLayout) -> KVLayout:
    """Of what moves from `source` into all that `target` holds. The end with the longer rows
    converts, the target where they are equal. Where inner orders differ, messages are in plain
    order, so that each side need know no order but that and its own."""
    return replace(
        target,
        dtype=min(source, target, key=lambda layout: layout.row_bytes).dtype,
        block_size=min(source.block_size, target.block_size),
        inner_order=target.inner_order if source.inner_order == target.inner_order else "plain",
    )


def plan_messages(positions: range, layout: KVLayout, max_message_bytes: int) -> list[range]:
    """Positions of each message of a piece, in order. `positions` starts at a unit, `layout` is of
    the messages. A message holds whole units, one at least; the last one may end within a unit."""
    unit = layout.block_size
    assert positions.start % unit == 0, (positions, unit)
    step = max(1, max_message_bytes // layout.bytes_per_block) * unit
    return [positions[i : i + step] for i in range(0, len(positions), step)]


def _cells(sources: Sequence[KVLayout], target: KVLayout) -> Iterator[KVLayout]:
    """`target`, cut wherever a source begins or ends."""
    layers = _cut(target.layers, (source.layers for source in sources))
    kv_heads = _cut(target.kv_heads, (source.kv_heads for source in sources))
    for layer_range, head_range in product(layers, kv_heads):
        yield replace(
            target,
            first_layer=layer_range.start,
            num_layers=len(layer_range),
            first_kv_head=head_range.start,
            num_kv_heads=len(head_range),
        )


def _cut(whole: range, others: Iterable[range]) -> list[range]:
    edges = {edge for other in others for edge in (other.start, other.stop) if edge in whole}
    return [range(*ends) for ends in pairwise(sorted(edges | {whole.start, whole.stop}))]


def _holders(sources: Sequence[KVLayout], cell: KVLayout) -> list[int]:
    holders = [index for index, source in enumerate(sources) if source.holds(cell)]
    if not holders:
        held = "; ".join(source.extent for source in sources)
        raise HandshakeRefusedError(
            f"KV layouts differ: no rank holds {cell.extent}, needed here; those there hold {held}"
        )
    return holders
