"""Plans cover every block once; what is gathered here and scattered there is the same bytes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout
from cpu_kernels.kv_order import tile
from kv_transfer.pack import StagingBuffer, digest, gather_blocks, reorder, scatter_blocks
from kv_transfer.plan import check_compatible, message_layout, plan_messages

LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=4,
    first_layer=0,
    num_layers=2,
    num_kv_heads=3,
    head_dim=5,
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.uint8])


@given(st.integers(0, 500), st.integers(1, 10_000), st.integers(1, 100_000))
def test_messages_cover_all_blocks_in_order_and_are_bounded(num_blocks, per_block, limit):
    parts = plan_messages(num_blocks, per_block, limit)
    assert [i for part in parts for i in part] == list(range(num_blocks))
    assert all(len(part) * per_block <= max(limit, per_block) for part in parts)
    full = max(1, limit // per_block)
    assert all(len(part) == full for part in parts[:-1]), "only the last message is smaller"


def test_equal_layouts_are_compatible():
    assert check_compatible(LAYOUT, replace(LAYOUT)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "n"),
        ("dtype", "bfloat16"),
        ("dtype", "int8"),
        ("block_size", 16),
        ("first_layer", 1),
        ("num_layers", 7),
        ("num_kv_heads", 9),
        ("head_dim", 64),
    ],
)
def test_a_difference_is_named_with_both_values(field, value):
    reason = check_compatible(LAYOUT, replace(LAYOUT, **{field: value}))
    assert reason is not None
    assert f"{field} differs: {getattr(LAYOUT, field)} here, {value} there" in reason


def tileable(**changes):
    return replace(LAYOUT, **{"block_size": 32, "head_dim": 6, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_layouts_that_differ_in_their_inner_order_alone_are_compatible(dtype):
    plain = tileable(dtype=dtype, head_dim=12)
    tiled = replace(plain, inner_order="tiles16")
    for src, dst in product((plain, tiled), repeat=2):
        assert check_compatible(src, dst) is None
        assert message_layout(src, dst) == (src if src == dst else plain)
    other = replace(tiled, head_dim=8)
    assert "head_dim differs: 12 here, 8 there" in check_compatible(plain, other)
    assert "head_dim differs: 8 here, 12 there" in check_compatible(other, plain)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inner_order": "tiles"}, "'tiles' is none of plain, tiles16"),
        ({"inner_order": ""}, "'' is none of plain, tiles16"),
        ({"dtype": "int8"}, "not int8, 32 and 6"),
        ({"dtype": "fp8", "head_dim": 8}, "not fp8, 32 and 8"),
        ({"block_size": 24}, "not float32, 24 and 6"),
        ({"dtype": "bfloat16", "head_dim": 5}, "not bfloat16, 32 and 5"),
    ],
)
def test_an_inner_order_that_cannot_be_is_refused_with_the_reason(changes, named):
    impossible = tileable(**{"inner_order": "tiles16", **changes})
    plain = replace(impossible, inner_order="plain")
    for src, dst in ((plain, impossible), (impossible, plain), (impossible, impossible)):
        assert named in (check_compatible(src, dst) or "")
    assert check_compatible(plain, plain) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_message_is_reordered_in_place_and_only_between_two_orders(dtype):
    plain = torch.randint(-128, 128, (2, 2, 5, 3, 32, 12)).to(dtype)
    for source, target in product(("plain", "tiles16"), repeat=2):
        made, wanted = (tile(plain) if o == "tiles16" else plain.clone() for o in (source, target))
        reorder(made, source, target)
        assert torch.equal(made, wanted)


def random_bytes(*shape):
    return torch.randint(0, 127, shape).float()


@st.composite
def pools(draw):
    """Two pools of different size but equal blocks, and distinct blocks of each."""
    num_layers, heads, block_size, head_dim = (draw(st.integers(1, n)) for n in (3, 3, 5, 6))
    dtype = draw(DTYPES)
    sizes = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    src, dst = (
        random_bytes(num_layers, 2, size, heads, block_size, head_dim).to(dtype) for size in sizes
    )
    count = draw(st.integers(1, min(sizes)))
    src_ids, dst_ids = (draw(st.permutations(range(size)))[:count] for size in sizes)
    return src, src_ids, dst, dst_ids


@settings(deadline=None, max_examples=60)
@given(pools())
def test_gather_then_scatter_copies_these_blocks_and_no_others(case):
    src, src_ids, dst, dst_ids = case
    before = dst.clone()
    message = StagingBuffer(src).message(len(src_ids))
    gather_blocks(src, src_ids, message)
    assert message.is_contiguous()
    scatter_blocks(message, dst, dst_ids)
    for here, there in zip(src_ids, dst_ids, strict=True):
        assert torch.equal(dst[:, :, there], src[:, :, here])
    others = [i for i in range(dst.shape[2]) if i not in dst_ids]
    assert torch.equal(dst[:, :, others], before[:, :, others])


def test_every_bit_pattern_survives():
    """NaN payloads and negative zeros included: blocks are bytes, not numbers."""
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 2, 3, 3, 4, 5), dtype=torch.int32)
    src, dst = bits.view(torch.float32), torch.zeros(2, 2, 3, 3, 4, 5)
    message = StagingBuffer(src).message(3)
    gather_blocks(src, [2, 0, 1], message)
    scatter_blocks(message, dst, [2, 0, 1])
    assert torch.equal(dst.view(torch.int32), bits)


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_pools_of_either_mode_work_and_stay_usable(made_in_inference_mode):
    """The engine may make and write its cache inside or outside of inference mode."""
    with torch.inference_mode(made_in_inference_mode):
        src, dst = torch.randn(1, 2, 4, 1, 2, 2), torch.zeros(1, 2, 4, 1, 2, 2)
    message = StagingBuffer(src).message(2)
    gather_blocks(src, [1, 3], message)
    scatter_blocks(message, dst, [0, 2])
    with torch.inference_mode():
        assert torch.equal(dst[:, :, [0, 2]], src[:, :, [1, 3]])
        dst[:, :, 0] = 1.0
    if not made_in_inference_mode:
        dst[:, :, 1] = 2.0
    assert dst[0, 0, 0, 0, 0, 0] == 1.0


def test_a_staging_buffer_grows_and_then_stays():
    buffer = StagingBuffer(torch.zeros(2, 2, 8, 1, 4, 3))
    large = buffer.message(6)
    assert large.shape == (2, 2, 6, 1, 4, 3)
    small = buffer.message(2)
    assert small.shape == (2, 2, 2, 1, 4, 3)
    assert small.is_contiguous()
    assert small.data_ptr() == large.data_ptr() == buffer.message(6).data_ptr()


@given(st.data(), DTYPES)
def test_the_digest_changes_with_any_byte(data, dtype):
    message = random_bytes(1, 2, 3, 1, 2, 2).to(dtype)
    before = digest(message)
    flat = message.view(-1).view(torch.uint8)
    index = data.draw(st.integers(0, flat.numel() - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    flat[index] ^= bit
    assert digest(message) != before
    flat[index] ^= bit
    assert digest(message) == before
