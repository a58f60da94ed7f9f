"""Tile order of KV blocks: where each number is, and that the way there and back loses no bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout
from cpu_kernels.kv_order import key_rows, scale_rows, tile, untile, value_rows

WIDTHS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
SCALES = {torch.float32: 0, torch.bfloat16: 0, torch.int8: 4}
"""Of a row's numbers, those that are its scale."""


def random_bits(dtype, *shape):
    """NaN payloads and negative zeros included: blocks are bytes, not numbers."""
    *outer, row_size = shape
    bits = torch.randint(0, 256, (*outer, row_size * dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


@st.composite
def pools(draw):
    """[num_layers, 2, num_blocks, num_kv_heads, block_size, row_size]; without layers at times."""
    dtype = draw(st.sampled_from(list(WIDTHS)))
    num_layers, num_blocks, num_kv_heads = (draw(st.integers(1, 3)) for _ in range(3))
    block_size = draw(st.sampled_from([16, 32, 48]))
    row_size = WIDTHS[dtype] * draw(st.integers(1, 9)) + SCALES[dtype]
    shape = (2, num_blocks, num_kv_heads, block_size, row_size)
    return random_bits(dtype, *shape if draw(st.booleans()) else (num_layers, *shape))


@settings(deadline=None, max_examples=60)
@given(pools())
def test_there_and_back_every_bit_is_what_it_was(pool):
    before = as_bytes(pool).clone()
    for made in (untile(tile(pool)), tile(untile(pool))):
        assert made.shape == pool.shape
        assert made.dtype == pool.dtype
        assert made.is_contiguous()
        assert torch.equal(as_bytes(made), before)
    assert torch.equal(as_bytes(pool), before), "the original is left alone"


@settings(deadline=None, max_examples=60)
@given(pools(), st.data())
def test_each_number_is_where_the_formula_says(pool, data):
    """The formula of the kernels: an offset into a head's slice of a block."""
    *outer, block_size, row_size = pool.shape
    width, head_dim = WIDTHS[pool.dtype], row_size - SCALES[pool.dtype]
    where = [data.draw(st.integers(0, size - 1)) for size in outer]
    p, d = data.draw(st.integers(0, block_size - 1)), data.draw(st.integers(0, row_size - 1))
    is_value = where[-3]
    start = p // 16 * 16 * row_size
    if d >= head_dim:
        offset = start + 16 * head_dim + p % 16 * 4 + d - head_dim
    elif is_value:
        offset = start + (p % 16 // width * head_dim + d) * width + p % width
    else:
        offset = start + (d // width * 16 + p % 16) * width + d % width
    tiled = tile(pool)[tuple(where)].flatten()
    assert torch.equal(as_bytes(tiled[offset : offset + 1]), as_bytes(pool[(*where, p, d)][None]))


def test_an_example_by_hand():
    """One block of one head, 16 positions of 4 numbers: position p holds 4p to 4p + 3."""
    block = torch.arange(64.0).view(16, 4)
    plain = torch.stack([block, block]).view(2, 1, 1, 16, 4)
    keys, values = tile(plain).flatten(1)
    assert keys[:16].tolist() == [4 * p for p in range(16)], "number 0 of all positions"
    assert keys[16:32].tolist() == [4 * p + 1 for p in range(16)]
    assert torch.equal(values, torch.arange(64.0)), "single float32 values stay as they are"
    keys, values = tile(plain.bfloat16()).flatten(1)
    assert keys[:6].tolist() == [0, 1, 4, 5, 8, 9], "numbers 0 and 1 of position after position"
    assert keys[30:36].tolist() == [60, 61, 2, 3, 6, 7], "then their numbers 2 and 3"
    assert values[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7], "positions 0 and 1 in pairs"
    assert values[8:12].tolist() == [8, 12, 9, 13], "then positions 2 and 3"


def test_an_example_with_scales_by_hand():
    """One block of one head, 16 positions of 4 numbers p and the scale 2**p."""
    scales = (2.0 ** torch.arange(16)).view(16, 1)
    numbers = torch.arange(16, dtype=torch.int8).view(16, 1).expand(16, 4)
    block = torch.cat((numbers, scales.view(torch.int8)), dim=1)
    keys, values = tile(torch.stack([block, block]).view(2, 1, 1, 16, 8)).flatten(1)
    assert keys[:64].tolist() == [p for p in range(16) for _ in range(4)]
    assert (
        values[:64].tolist()
        == [*range(4)] * 4 + [*range(4, 8)] * 4 + [*range(8, 12)] * 4 + [*range(12, 16)] * 4
    )
    for side in (keys, values):
        assert torch.equal(side[64:].view(torch.float32), scales.flatten())


def test_the_second_tile_of_a_block_follows_the_first():
    plain = random_bits(torch.bfloat16, 2, 1, 1, 32, 6)
    for part in (slice(0, 16), slice(16, 32)):
        alone = tile(plain[..., part, :].contiguous())
        assert torch.equal(as_bytes(tile(plain)[..., part, :]), as_bytes(alone))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_rows_are_written_through_the_views(dtype):
    """As a step does that stores the keys and values of a few positions."""
    row = torch.arange(1.0, 9.0 + SCALES[dtype]).to(dtype)
    numbers, scale = row[:8], row[8:]
    tiled = torch.zeros(2, 3, 2, 32, len(row), dtype=dtype)
    keys, values = key_rows(tiled[0]), value_rows(tiled[1])
    position = 21
    first, second = divmod(position, 16)
    keys[2, 1, first, second] = numbers.view(keys.shape[-2:])
    values[2, 1, first, second // WIDTHS[dtype], second % WIDTHS[dtype]] = numbers
    for side in tiled:
        scale_rows(side)[2, 1, first, second] = scale
    plain = untile(tiled)
    assert torch.equal(plain[:, 2, 1, position], torch.stack([row, row]))
    assert plain.count_nonzero() == 2 * len(row)


def test_which_layouts_can_be_tiled():
    def fault(**changes):
        shape = {"dtype": "float32", "block_size": 16, "num_kv_heads": 1, "head_dim": 3, **changes}
        layout = KVLayout(model="m", first_layer=0, num_layers=1, inner_order="tiles16", **shape)
        return layout.order_fault()

    assert fault() is fault(block_size=48) is fault(dtype="bfloat16", head_dim=6) is None
    assert fault(dtype="int8", head_dim=4) is None
    for changes in ({"dtype": "fp8", "head_dim": 4}, {"block_size": 8}, {"dtype": "bfloat16"},
                    {"dtype": "int8", "head_dim": 6}):  # fmt: skip
        assert "inner_order tiles16 needs" in fault(**changes)
