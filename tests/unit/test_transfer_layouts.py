"""KV moves between workers of any two shapes: what arrives is what left, as a cache of the target's
dtype would hold it, and nothing else in the target's pools changes."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import INNER_ORDERS, KVLayout
from cpu_kernels.kv_dtype import KV_DTYPES
from cpu_kernels.kv_order import tile, untile
from kv_transfer.pack import StagingBuffer, gather, scatter
from kv_transfer.plan import check_messages, plan_messages, plan_pieces
from parallel.partition import kv_head_range, layer_range

CPU = torch.device("cpu")
HEAD_DIM = 4
BLOCK_SIZES = (4, 8, 16, 32, 64)


@dataclass
class Worker:
    """Its ranks' layouts and pools, and the blocks of one sequence."""

    layouts: list
    pools: list
    block_ids: list

    def rows(self, rank):
        """The sequence's rows in plain order, [layers, 2, kv heads, positions, row_size]."""
        pool, layout = self.pools[rank], self.layouts[rank]
        plain = untile(pool) if layout.is_tiled else pool
        return plain[:, :, self.block_ids].transpose(2, 3).flatten(3, 4)

    def write(self, rank, rows):
        """Rows of all the blocks' positions."""
        pool, layout = self.pools[rank], self.layouts[rank]
        plain = untile(pool) if layout.is_tiled else pool.clone()
        shape = (len(self.block_ids), layout.block_size)
        plain[:, :, self.block_ids] = rows.unflatten(3, shape).transpose(2, 3)
        pool.copy_(tile(plain) if layout.is_tiled else plain)


def noise(layout, num_blocks, seed):
    """Any bytes: NaN, infinities and scales that are neither finite nor positive among them."""
    generator = torch.Generator().manual_seed(seed)
    storage = KV_DTYPES[layout.dtype].storage
    shape = layout.shape(num_blocks)
    size = (*shape[:-1], shape[-1] * storage.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(storage)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def layouts_of(stages, num_kv_heads, tp, **same):
    """All stages' ranks; `stages` are ranges of layers."""
    head_ranges = [kv_head_range(num_kv_heads, rank, tp) for rank in range(tp)]
    return [
        KVLayout(
            model="m",
            head_dim=HEAD_DIM,
            first_layer=layers.start,
            num_layers=len(layers),
            first_kv_head=heads.start,
            num_kv_heads=len(heads),
            **same,
        )
        for layers, heads in product(stages, head_ranges)
    ]


@st.composite
def workers(draw, num_layers, num_kv_heads, num_positions):
    """A worker's ranks with pools full of noise; each with blocks for the positions and more."""
    sizes = [tp for tp in range(1, 5) if num_kv_heads % tp == 0 or tp % num_kv_heads == 0]
    tp = draw(st.sampled_from(sizes))
    pp = draw(st.integers(1, min(3, num_layers)))
    cuts = draw(st.permutations(range(1, num_layers)))[: pp - 1]
    stages = [range(*ends) for ends in pairwise([0, *sorted(cuts), num_layers])]
    layouts = layouts_of(
        stages,
        num_kv_heads,
        tp,
        dtype=draw(st.sampled_from(list(KV_DTYPES))),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
    )
    orders = [replace(layouts[0], inner_order=order) for order in INNER_ORDERS]
    possible = [layout.inner_order for layout in orders if layout.order_fault() is None]
    inner_order = draw(st.sampled_from(possible))
    layouts = [replace(layout, inner_order=inner_order) for layout in layouts]
    num_used = -(-num_positions // layouts[0].block_size)
    num_blocks = num_used + draw(st.integers(0, 2))
    block_ids = draw(st.permutations(range(num_blocks)))[:num_used]
    seed = draw(st.integers(0, 2**31))
    pools = [noise(layout, num_blocks, seed + i) for i, layout in enumerate(layouts)]
    return Worker(layouts, pools, block_ids)


@st.composite
def cases(draw):
    num_layers, num_kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    end = draw(st.integers(1, 150))
    whole = workers(num_layers, num_kv_heads, end)
    source, target = draw(whole), draw(whole)
    unit = min(source.layouts[0].block_size, target.layouts[0].block_size)
    start = unit * draw(st.integers(0, (end - 1) // unit))
    seed = draw(st.integers(0, 2**31))
    numbers = torch.randn(
        num_layers, 2, num_kv_heads, end, HEAD_DIM, generator=torch.Generator().manual_seed(seed)
    )
    return source, target, numbers, range(start, end), draw(st.integers(1, 5000))


def fill(source, numbers):
    """Positions of the sequence; behind its end stays noise."""
    end = numbers.shape[3]
    for rank, layout in enumerate(source.layouts):
        rows = source.rows(rank)
        held = numbers[layout.layers.start : layout.layers.stop]
        held = held[:, :, layout.kv_heads.start : layout.kv_heads.stop]
        rows[:, :, :, :end] = KV_DTYPES[layout.dtype].encode(held)
        source.write(rank, rows)


def transfer(source, target, positions, max_message_bytes):
    """Everything that moves: (target rank, layer, kv head, position) -> how often."""
    moved = Counter()
    for piece in plan_pieces(source.layouts, target.layouts):
        there, here = source.layouts[piece.source], target.layouts[piece.target]
        layout = piece.layout
        assert check_messages(there, layout) is None
        messages = plan_messages(positions, layout, max_message_bytes)
        sending, receiving = StagingBuffer(layout, CPU), StagingBuffer(layout, CPU)
        for part in messages:
            sent, message = sending.message(part), receiving.message(part)
            assert sent.nbytes <= max(max_message_bytes, layout.bytes_per_block)
            gather(source.pools[piece.source], there, source.block_ids, part, sent, layout)
            message.copy_(sent)
            scatter(message, layout, target.pools[piece.target], here, target.block_ids, part)
            moved.update(product([piece.target], layout.layers, layout.kv_heads, part))
    return moved


def expected(numbers, there, here):
    """Rows of a rank `here` after they were in a cache like `there`."""
    rows = KV_DTYPES[there.dtype].encode(numbers)
    if there.dtype != here.dtype:
        rows = KV_DTYPES[here.dtype].encode(KV_DTYPES[there.dtype].decode(rows, torch.float32))
    rows = rows[here.layers.start : here.layers.stop]
    return rows[:, :, here.kv_heads.start : here.kv_heads.stop]


def check_transfer(source, target, numbers, positions, max_message_bytes):
    fill(source, numbers)
    sources_before = [pool.clone() for pool in source.pools]
    pools_before = [pool.clone() for pool in target.pools]
    rows_before = [target.rows(rank).clone() for rank in range(len(target.layouts))]
    moved = transfer(source, target, positions, max_message_bytes)
    unit = min(source.layouts[0].block_size, target.layouts[0].block_size)
    unit_end = -(-positions.stop // unit) * unit
    for rank, layout in enumerate(target.layouts):
        wanted = rows_before[rank]
        wanted[:, :, :, positions.start : positions.stop] = expected(
            numbers, source.layouts[0], layout
        )[:, :, :, positions.start : positions.stop]
        rows = target.rows(rank)
        tail = KV_DTYPES[layout.dtype].decode(
            rows[:, :, :, positions.stop : unit_end].contiguous(), torch.float32
        )
        assert not tail.any(), "zeros behind the end: 0 * NaN would be NaN"
        wanted[:, :, :, positions.stop : unit_end] = rows[:, :, :, positions.stop : unit_end]
        assert torch.equal(as_bytes(rows), as_bytes(wanted))
        others = [i for i in range(len(pools_before[rank][0, 0])) if i not in target.block_ids]
        after, before = target.pools[rank][:, :, others], pools_before[rank][:, :, others]
        assert torch.equal(as_bytes(after), as_bytes(before))
        once = product([rank], layout.layers, layout.kv_heads, positions)
        assert all(moved.pop(place) == 1 for place in once)
    assert not moved
    for pool, before in zip(source.pools, sources_before, strict=True):
        assert torch.equal(as_bytes(pool), as_bytes(before))


@settings(deadline=None, max_examples=150)
@given(cases())
def test_any_worker_can_hand_over_to_any_other(case):
    check_transfer(*case)


def worker(num_positions, tp, pp, **same):
    """Of 5 layers and 4 kv heads."""
    layouts = layouts_of([layer_range(5, stage, pp) for stage in range(pp)], 4, tp, **same)
    num_blocks = -(-num_positions // layouts[0].block_size)
    pools = [noise(layout, num_blocks + 1, seed) for seed, layout in enumerate(layouts)]
    return Worker(layouts, pools, list(range(num_blocks, 0, -1)))


KINDS = [
    {"dtype": dtype, "block_size": block_size, "inner_order": order}
    for dtype, block_size, order in product(("float32", "bfloat16", "int8"), (8, 32), INNER_ORDERS)
    for layout in layouts_of([range(1)], 1, 1, dtype=dtype, block_size=block_size)
    if replace(layout, inner_order=order).order_fault() is None
]
IDS = ["-".join(map(str, kind.values())) for kind in KINDS]


@pytest.mark.parametrize("target", KINDS, ids=IDS)
@pytest.mark.parametrize("source", KINDS, ids=IDS)
def test_every_pair_of_dtypes_block_sizes_and_orders(source, target):
    """From two tensor-parallel ranks to two stages, behind a prefix hit."""
    start, end = 32, 75
    sides = worker(end, 2, 1, **source), worker(end, 1, 2, **target)
    numbers = torch.randn(5, 2, 4, end, HEAD_DIM)
    check_transfer(*sides, numbers, range(start, end), 2000)


@st.composite
def shapes(draw):
    """Ranks of two workers of one model, without pools."""
    num_layers, num_kv_heads = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    return [
        layouts_of(
            [layer_range(num_layers, i, pp) for i in range(pp)],
            num_kv_heads,
            draw(
                st.sampled_from(
                    [tp for tp in range(1, 9) if num_kv_heads % tp == 0 or tp % num_kv_heads == 0]
                )
            ),
            dtype="float32",
            block_size=16,
        )
        for pp in draw(st.tuples(*[st.integers(1, min(4, num_layers))] * 2))
    ]


@given(shapes())
def test_pieces_cover_each_target_once_from_ranks_that_hold_them_and_share_the_work(workers):
    sources, targets = workers
    pieces = plan_pieces(sources, targets)
    assert pieces == plan_pieces(tuple(replace(x) for x in sources), tuple(targets))
    given = Counter()
    for piece in pieces:
        assert sources[piece.source].holds(piece.layout)
        assert targets[piece.target].holds(piece.layout)
        given.update(product([piece.target], piece.layout.layers, piece.layout.kv_heads))
    wanted = {
        place
        for rank, layout in enumerate(targets)
        for place in product([rank], layout.layers, layout.kv_heads)
    }
    assert given == dict.fromkeys(wanted, 1)
    pairs = [(piece.source, piece.target) for piece in pieces]
    assert len(set(pairs)) == len(pairs), "one stream for each pair of ranks"
    for stage in {(x.first_layer, x.first_kv_head) for x in sources}:
        copies = [i for i, x in enumerate(sources) if (x.first_layer, x.first_kv_head) == stage]
        loads = [
            sum(p.layout.num_layers * p.layout.num_kv_heads for p in pieces if p.source == i)
            for i in copies
        ]
        largest = max(
            p.layout.num_layers * p.layout.num_kv_heads for p in pieces if p.source in copies
        )
        assert max(loads) - min(loads) <= largest
