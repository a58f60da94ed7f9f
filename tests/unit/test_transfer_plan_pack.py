"""What `plan` makes of layouts, what it refuses, and what `pack` does to single messages. Whole
transfers between workers of any shape: test_transfer_layouts.py."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import HandshakeRefusedError
from core.kv import KVLayout
from cpu_kernels.kv_dtype import KV_DTYPES
from cpu_kernels.kv_order import tile
from kv_transfer.pack import StagingBuffer, digest, gather, scatter
from kv_transfer.plan import (
    Piece,
    check_compatible,
    check_messages,
    message_layout,
    plan_messages,
    plan_pieces,
)

CPU = torch.device("cpu")
LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=4,
    first_layer=0,
    num_layers=2,
    num_kv_heads=3,
    head_dim=5,
)
WIDE = replace(LAYOUT, block_size=32, head_dim=8)
"""Can have any dtype and inner order."""
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.uint8])


# Messages


@given(
    st.integers(0, 50), st.integers(0, 2000), st.sampled_from([4, 16, 64]), st.integers(1, 100_000)
)
def test_messages_cover_all_positions_in_order_and_are_bounded(first, num, unit, limit):
    layout = replace(LAYOUT, block_size=unit)
    positions = range(first * unit, first * unit + num)
    messages = plan_messages(positions, layout, limit)
    assert [i for message in messages for i in message] == list(positions)
    assert all(message.start % unit == 0 for message in messages)
    full = max(1, limit // layout.bytes_per_block) * unit
    assert all(len(message) == full for message in messages[:-1]), "only the last one is smaller"
    assert all(len(message) <= full for message in messages)


# Pieces


def ranks(*extents, **changes):
    """A worker of ranks with (first layer, layers, first kv head, kv heads) each."""
    names = ("first_layer", "num_layers", "first_kv_head", "num_kv_heads")
    return [replace(LAYOUT, **changes, **dict(zip(names, e, strict=True))) for e in extents]


def told(pieces):
    return [
        (piece.source, piece.target, piece.layout.layers, piece.layout.kv_heads) for piece in pieces
    ]


def test_equal_workers_of_one_rank_move_everything_in_one_piece():
    assert plan_pieces([LAYOUT], [LAYOUT]) == (Piece(source=0, target=0, layout=LAYOUT),)


def test_two_tensor_parallel_ranks_give_one_rank_half_of_the_heads_each():
    sources = ranks((0, 4, 0, 3), (0, 4, 3, 3))
    pieces = plan_pieces(sources, ranks((0, 4, 0, 6)))
    assert told(pieces) == [(0, 0, range(4), range(3)), (1, 0, range(4), range(3, 6))]
    assert [piece.layout for piece in pieces] == sources, "no byte of them is reordered"


def test_one_rank_gives_each_of_two_uneven_stages_its_layers():
    targets = ranks((0, 3, 0, 6), (3, 2, 0, 6))
    pieces = plan_pieces(ranks((0, 5, 0, 6)), targets)
    assert told(pieces) == [(0, 0, range(3), range(6)), (0, 1, range(3, 5), range(6))]
    assert [piece.layout for piece in pieces] == targets


def test_stages_and_heads_that_fall_into_each_other_are_cut_at_every_border():
    sources = ranks((0, 3, 0, 4), (3, 3, 0, 4))
    targets = ranks((0, 2, 0, 2), (0, 2, 2, 2), (2, 4, 0, 2), (2, 4, 2, 2))
    left, right = range(2), range(2, 4)
    assert told(plan_pieces(sources, targets)) == [
        (0, 0, range(2), left),
        (0, 1, range(2), right),
        (0, 2, range(2, 3), left),
        (1, 2, range(3, 6), left),
        (0, 3, range(2, 3), right),
        (1, 3, range(3, 6), right),
    ]


def test_ranks_that_hold_copies_of_a_head_share_the_work():
    """Targets that hold copies too have layouts that cannot be told apart: each gets a source of
    its own all the same. So do the stages of one head."""
    copies = ranks((0, 4, 0, 1), (0, 4, 0, 1), (0, 4, 1, 1), (0, 4, 1, 1))
    assert [p.source for p in plan_pieces(copies, copies)] == [0, 1, 2, 3]
    stages = ranks((0, 2, 0, 2), (2, 2, 0, 2))
    assert [p.source for p in plan_pieces(copies, stages)] == [0, 2, 1, 3]
    uneven = ranks((0, 3, 0, 1), (3, 1, 0, 1), (0, 3, 0, 1), (3, 1, 0, 1), (0, 4, 0, 1))
    sources = [p.source for p in plan_pieces(copies[:2], uneven)]
    assert sources == [0, 1, 1, 0, 0], "4 layers each, then the first"


@pytest.mark.parametrize(
    ("source", "target", "moved"),
    [
        ({}, {}, {}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"dtype": "int8"}, {"dtype": "bfloat16"}, {"dtype": "int8"}),
        ({"dtype": "float32"}, {"dtype": "fp8"}, {"dtype": "fp8"}),
        ({"dtype": "int8"}, {"dtype": "fp8"}, {"dtype": "int8"}),
        ({"dtype": "fp8"}, {"dtype": "int8"}, {"dtype": "fp8"}),
        ({"block_size": 16}, {"block_size": 64}, {"block_size": 16}),
        ({"block_size": 64}, {"block_size": 4}, {"block_size": 4}),
        ({"inner_order": "tiles16"}, {}, {}),
        ({}, {"inner_order": "tiles16"}, {}),
        ({"inner_order": "tiles16"}, {"inner_order": "tiles16"}, {"inner_order": "tiles16"}),
        (
            {"inner_order": "tiles16", "dtype": "bfloat16", "block_size": 64},
            {"inner_order": "tiles16"},
            {"inner_order": "tiles16", "dtype": "bfloat16"},
        ),
    ],
)
def test_messages_have_the_shorter_rows_the_smaller_blocks_and_the_common_order(
    source, target, moved
):
    source, target, moved = (replace(WIDE, **changes) for changes in (source, target, moved))
    assert check_compatible(source, target) is None
    assert message_layout(source, target) == moved
    assert plan_pieces([source], [target])[0].layout == moved
    assert check_messages(source, moved) is None


# Refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "n"}, "model differs: m here, n there"),
        ({"head_dim": 64}, "head_dim differs: 8 here, 64 there"),
        (
            {"block_size": 24},
            "block_size differs: 32 here, 24 there, and neither divides the other",
        ),
        ({"dtype": "int4"}, "dtype 'int4' is none of float32, bfloat16, int8, fp8"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"first_layer": -1}, "first_layer is -1"),
        ({"first_kv_head": -2}, "first_kv_head is -2"),
        ({"inner_order": "tiles"}, "'tiles' is none of plain, tiles16"),
        ({"inner_order": ""}, "'' is none of plain, tiles16"),
        ({"inner_order": "tiles16", "dtype": "fp8"}, "not fp8, 32 and 8"),
        ({"inner_order": "tiles16", "block_size": 8}, "not float32, 8 and 8"),
    ],
)
def test_layouts_that_cannot_be_or_cannot_meet_are_refused_with_both_values(changes, named):
    other = replace(WIDE, **changes)
    assert named in (check_compatible(WIDE, other) or "")
    assert check_compatible(other, WIDE) is not None
    with pytest.raises(HandshakeRefusedError, match="KV layout"):
        plan_pieces([WIDE, other], [WIDE])
    with pytest.raises(HandshakeRefusedError, match="KV layout"):
        plan_pieces([WIDE], [WIDE, other])
    assert named in (check_messages(WIDE, other) or "")


def test_rows_whose_scale_would_not_be_aligned_are_refused():
    odd = replace(LAYOUT, dtype="int8", head_dim=6)
    assert "dtype int8 needs head_dim in steps of 4, not 6" in (check_compatible(odd, odd) or "")


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ((0, 5, 0, 2), "layers 4 to 4, kv heads 0 to 0"),
        ((3, 2, 1, 1), "layers 4 to 4, kv heads 1 to 1"),
        ((0, 4, 1, 2), "layers 0 to 3, kv heads 2 to 2"),
        ((9, 1, 9, 1), "layers 9 to 9, kv heads 9 to 9"),
    ],
)
def test_what_no_source_holds_is_named_with_what_they_hold(missing, named):
    sources = ranks((0, 4, 0, 1), (0, 4, 1, 1))
    with pytest.raises(HandshakeRefusedError) as caught:
        plan_pieces(sources, ranks(missing))
    held = "layers 0 to 3, kv heads 0 to 0; layers 0 to 3, kv heads 1 to 1"
    assert f"no rank holds {named}, needed here; those there hold {held}" in str(caught.value)


def test_no_source_at_all_is_refused():
    with pytest.raises(HandshakeRefusedError, match="no rank holds"):
        plan_pieces([], [LAYOUT])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 8}, "block_size differs: 4 here, 8 there"),
        ({"first_layer": 1}, "layers 0 to 1, kv heads 0 to 2 here, layers 1 to 2"),
        ({"num_layers": 3}, "layers 0 to 1, kv heads 0 to 2 here, layers 0 to 2"),
        ({"first_kv_head": 3}, "kv heads 0 to 2 here, layers 0 to 1, kv heads 3 to 5 there"),
        ({"num_kv_heads": 2**31 - 1}, "kv heads 0 to 2147483646 there"),
    ],
)
def test_messages_that_a_cache_cannot_fill_are_refused_with_both_values(changes, named):
    assert named in (check_messages(LAYOUT, replace(LAYOUT, **changes)) or "")


# Messages of blocks


def random_bytes(*shape):
    return torch.randint(0, 127, shape).float()


def move(src, src_ids, dst, dst_ids, layout):
    positions = range(len(src_ids) * layout.block_size)
    message = StagingBuffer(layout, CPU).message(positions)
    gather(src, layout, src_ids, positions, message, layout)
    assert message.is_contiguous()
    scatter(message, layout, dst, layout, dst_ids, positions)


@st.composite
def pools(draw):
    """Two pools of different size but equal blocks, and distinct blocks of each."""
    num_layers, heads, block_size, head_dim = (draw(st.integers(1, n)) for n in (3, 3, 5, 6))
    dtype = draw(st.sampled_from(list(KV_DTYPES)))
    layout = replace(
        LAYOUT,
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=heads,
        block_size=block_size,
        head_dim=head_dim,
    )
    sizes = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    src, dst = (random_bytes(*layout.shape(n)).to(KV_DTYPES[dtype].storage) for n in sizes)
    count = draw(st.integers(1, min(sizes)))
    src_ids, dst_ids = (draw(st.permutations(range(size)))[:count] for size in sizes)
    return layout, src, src_ids, dst, dst_ids


@settings(deadline=None, max_examples=60)
@given(pools())
def test_between_equal_layouts_these_blocks_are_copied_and_no_others(case):
    layout, src, src_ids, dst, dst_ids = case
    before = dst.clone()
    move(src, src_ids, dst, dst_ids, layout)
    for here, there in zip(src_ids, dst_ids, strict=True):
        assert torch.equal(dst[:, :, there], src[:, :, here])
    others = [i for i in range(dst.shape[2]) if i not in dst_ids]
    assert torch.equal(dst[:, :, others], before[:, :, others])


def test_every_bit_pattern_survives():
    """NaN payloads and negative zeros included: blocks are bytes, not numbers."""
    bits = torch.randint(-(2**31), 2**31 - 1, LAYOUT.shape(3), dtype=torch.int32)
    src, dst = bits.view(torch.float32), torch.zeros(LAYOUT.shape(3))
    move(src, [2, 0, 1], dst, [2, 0, 1], LAYOUT)
    assert torch.equal(dst.view(torch.int32), bits)


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_pools_of_either_mode_work_and_stay_usable(made_in_inference_mode):
    """The engine may make and write its cache inside or outside of inference mode."""
    with torch.inference_mode(made_in_inference_mode):
        src, dst = torch.randn(LAYOUT.shape(4)), torch.zeros(LAYOUT.shape(4))
    move(src, [1, 3], dst, [0, 2], LAYOUT)
    with torch.inference_mode():
        assert torch.equal(dst[:, :, [0, 2]], src[:, :, [1, 3]])
        dst[:, :, 0] = 1.0
    if not made_in_inference_mode:
        dst[:, :, 1] = 2.0
    assert dst[0, 0, 0, 0, 0, 0] == 1.0


def test_a_staging_buffer_grows_and_then_stays():
    buffer = StagingBuffer(LAYOUT, CPU)
    large = buffer.message(range(24))
    assert large.shape == (2, 2, 6, 3, 4, 5)
    small = buffer.message(range(8, 13))
    assert small.shape == (2, 2, 2, 3, 4, 5)
    assert small.is_contiguous()
    assert small.data_ptr() == large.data_ptr() == buffer.message(range(24)).data_ptr()


def test_a_hit_of_48_positions_leaves_a_quarter_of_the_first_block_of_64_to_be_filled():
    """From blocks of 16 to blocks of 64, positions 48 to 99: units 3 to 6, the last one partial."""
    small = replace(LAYOUT, block_size=16, num_layers=1, num_kv_heads=1, head_dim=1)
    large = replace(small, block_size=64)
    src = torch.full(small.shape(9), torch.nan)
    src_ids = [8, 1, 7, 2, 6, 3, 5]
    src[0, 0, src_ids] = torch.arange(112.0).view(7, 1, 16, 1)
    src[0, 1, src_ids] = -torch.arange(112.0).view(7, 1, 16, 1)
    src[:, :, 5, :, 4:] = torch.nan  # position 100 and on
    dst = torch.full(large.shape(3), 0.5)
    (piece,) = plan_pieces([small], [large])
    messages = plan_messages(range(48, 100), piece.layout, 2 * piece.layout.bytes_per_block)
    assert messages == [range(48, 80), range(80, 100)]
    for positions in messages:
        message = StagingBuffer(piece.layout, CPU).message(positions)
        assert message.shape == (1, 2, 2, 1, 16, 1)
        gather(src, small, src_ids, positions, message, piece.layout)
        scatter(message, piece.layout, dst, large, [2, 0], positions)
    keys, values = dst[0, :, [2, 0]].view(2, 128)
    before, end, unit_end = 48, 100, 112
    for rows, sign in ((keys, 1), (values, -1)):
        assert (rows[:before] == 0.5).all()
        assert torch.equal(rows[before:end], sign * torch.arange(48.0, 100.0))
        assert (rows[end:unit_end] == 0).all(), "never what the source has there"
        assert (rows[unit_end:] == 0.5).all()
    assert (dst[0, :, 1] == 0.5).all()


@pytest.mark.parametrize("tiled", [{"num_kv_heads": 1, "first_kv_head": 1}, {}])
def test_a_message_may_be_asked_for_in_an_order_that_the_owner_does_not_keep(tiled):
    """A receiver believes what a handle says of the owner's layout."""
    messages = replace(WIDE, inner_order="tiles16", block_size=16, **tiled)
    src = torch.randn(WIDE.shape(3))
    message = StagingBuffer(messages, CPU).message(range(64))
    assert check_messages(WIDE, messages) is None
    gather(src, WIDE, [2, 0], range(64), message, messages)
    heads = src[:, :, [2, 0], messages.first_kv_head :][:, :, :, : messages.num_kv_heads]
    units = heads.unflatten(4, (2, 16)).transpose(3, 4).flatten(2, 3)
    assert torch.equal(message, tile(units.contiguous()))
    dst = torch.zeros(WIDE.shape(3))
    scatter(message, messages, dst, WIDE, [1, 2], range(64))
    held = range(messages.first_kv_head, messages.first_kv_head + messages.num_kv_heads)
    assert torch.equal(dst[:, :, [1, 2]][:, :, :, held], heads)


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
