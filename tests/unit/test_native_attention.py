"""Attention of the CPU kernels against the reference in torch, over a cache in each one's order."""

import random
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout
from core.model_config import ModelConfig
from cpu_kernels.attention import can_attend
from cpu_kernels.cpu_level import levels_here
from cpu_kernels.kv_dtype import KV_DTYPES
from cpu_kernels.kv_order import tile, untile
from cpu_kernels.library import load_library
from engine.batch import Batch, ScheduledSequence, build_inputs
from engine.kernels import paged_attention, plan_attention
from engine.kernels.native_attention import native_layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

NUM_BLOCKS = 48
KV_DTYPES_OF = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
TOLERANCE = {
    (torch.float32, "float32"): 3e-5,
    (torch.bfloat16, "bfloat16"): 4e-2,
    (torch.float32, "int8"): 1e-3,
    (torch.bfloat16, "int8"): 8e-3,
}
"""By rows and cache. The reference computes in float32 whatever the rows are, and attends to the
same stored numbers. A bfloat16 cache makes the kernels round scaled queries, weights and answers to
8 bits. An int8 one makes them round queries and weights to 16: a query of magnitudes up to 4 by
4 / 65278 at most, so a score over 512 dimensions by 1e-4 (one standard deviation at scale 0.1); a
weight by 1 / 131070 of the largest in 128 positions, so an answer by 5e-5. The answers themselves
are then rounded to what the rows are, to 8 bits in bfloat16: 4e-3 of 1."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    head_dim: int = 32
    kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

    @property
    def config(self):
        heads = self.kv_heads * self.group
        return ModelConfig(
            architecture="llama",
            vocab_size=1,
            hidden_size=heads * self.head_dim,
            intermediate_size=1,
            num_layers=1,
            num_attention_heads=heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_model_len=1000,
            norm_eps=1e-5,
            sliding_windows=(self.window,),
            attn_logit_softcap=self.softcap,
            attention_scale=self.scale,
        )

    def layout(self, kv_dtype):
        return KVLayout(
            model="m",
            dtype=kv_dtype,
            block_size=self.block_size,
            first_layer=0,
            num_layers=1,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )


class Rows:
    """A sequence's random rows and the blocks it was dealt."""

    def __init__(self, length, shape, dtype, generator, free):
        # As a model's: parts of one product's rows.
        qkv = torch.randn(
            length, shape.kv_heads * (shape.group + 2), shape.head_dim, generator=generator
        )
        self.length = length
        self.qkv = qkv.to(dtype)
        self.block_ids = tuple(free.pop() for _ in range(-(-length // shape.block_size)))


class World:
    def __init__(self, shape, lengths, dtype=torch.float32, seed=0, kv_dtype=None):
        self.shape, self.dtype = shape, dtype
        self.kv_dtype = kv_dtype or KV_DTYPES_OF[dtype]
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.sequences = [Rows(length, shape, dtype, generator, free) for length in lengths]

    def empty_cache(self):
        layout, storage = self.shape.layout(self.kv_dtype), KV_DTYPES[self.kv_dtype].storage
        row_size = layout.row_bytes // storage.itemsize
        size = (1, 2, NUM_BLOCKS, layout.num_kv_heads, layout.block_size, row_size)
        return torch.zeros(size, dtype=storage)

    def step(self, cache, chunks, library=None):
        """`chunks`: (sequence's index, first row, end row). One result per chunk; without a library
        the cache is in plain order and the step in float32."""
        shares, parts = [], []
        for index, start, end in chunks:
            sequence = self.sequences[index]
            shares.append(
                ScheduledSequence(
                    request_id=str(index),
                    token_ids=(0,) * (end - start),
                    num_computed_tokens=start,
                    block_ids=sequence.block_ids,
                    samples=(),
                )
            )
            parts.append(sequence.qkv[start:end])
        shape = self.shape
        inputs = build_inputs(
            Batch(sequences=tuple(shares)), block_size=shape.block_size, device=cache.device
        )
        layout = shape.layout(self.kv_dtype)
        if library is not None:
            layout = native_layout(layout, shape.config)
            assert layout.inner_order == "tiles16"
        heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
        rows = torch.cat(parts) if library is not None else torch.cat(parts).float()
        query, key, value = rows.split(heads, dim=1)
        plan = plan_attention(inputs, layout, NUM_BLOCKS, shape.config, library, dtype=rows.dtype)
        out = paged_attention(query, key, value, cache[0], plan, shape.window)
        return out.split([end - start for _, start, end in chunks])

    def run(self, steps, library=None, cache=None):
        """(all rows by sequence, cache)."""
        cache = self.empty_cache() if cache is None else cache
        found = [[] for _ in self.sequences]
        for chunks in steps:
            outs = self.step(cache, chunks, library)
            for (index, _, _), out in zip(chunks, outs, strict=True):
                found[index].append(out)
        return [torch.cat(parts) for parts in found], cache


def whole(lengths):
    return [[(i, 0, length) for i, length in enumerate(lengths)]]


def one_by_one(lengths):
    """Each sequence alone, each token alone."""
    return [[(i, at, at + 1)] for i, length in enumerate(lengths) for at in range(length)]


def mixed(lengths, seed):
    """Steps of chunks and single tokens, side by side."""
    chance = random.Random(seed)
    computed = [0] * len(lengths)
    steps = []
    while computed != lengths:
        step = []
        for i, length in enumerate(lengths):
            left = length - computed[i]
            count = min(left, chance.choice([0, 1, 1, 17, left]))
            if count:
                step.append((i, computed[i], computed[i] + count))
                computed[i] += count
        if step:
            steps.append(step)
    return steps


shapes = st.builds(
    Shape,
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 512]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    block_size=st.sampled_from([16, 32, 48, 64]),
    window=st.none() | st.integers(1, 150),
    softcap=st.none() | st.just(1.5),
    scale=st.none() | st.just(0.1),
)
many_lengths = st.lists(st.integers(1, 180), min_size=1, max_size=4)
seeds = st.integers(0, 1000)
dtypes = st.sampled_from(list(TOLERANCE))
"""Of rows and cache."""


@pytest.fixture(scope="module", params=levels_here())
def library(request):
    return load_library(request.param, note=lambda text: None)


@pytest.fixture(scope="module")  # so that hypothesis may use it
def set_threads():
    """Sets torch's number, which the kernels follow."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(deadline=None, max_examples=25)
@given(shape=shapes, lengths=many_lengths, dtypes=dtypes, seed=seeds)
def test_equals_the_reference(library, shape, lengths, dtypes, seed):
    dtype, kv_dtype = dtypes
    world = World(shape, lengths, dtype, seed, kv_dtype)
    steps = mixed(lengths, seed)
    expected, plain = world.run(steps)
    got, tiled = world.run(steps, library)
    assert torch.equal(untile(tiled), plain)
    for mine, reference in zip(got, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(
            mine.float(), reference, atol=TOLERANCE[dtypes], rtol=TOLERANCE[dtypes]
        )


@settings(deadline=None, max_examples=10)
@given(shape=shapes, lengths=many_lengths, dtypes=dtypes, seed=seeds, threads=st.integers(1, 3))
def test_chunks_neighbours_and_threads_change_no_bit(
    library, set_threads, shape, lengths, dtypes, seed, threads
):
    dtype, kv_dtype = dtypes
    world = World(shape, lengths, dtype, kv_dtype=kv_dtype)
    set_threads(1)
    at_once, cache = world.run(whole(lengths), library)
    set_threads(threads)
    apart, other_cache = world.run(mixed(lengths, seed), library)
    assert torch.equal(cache, other_cache)
    for mine, other in zip(at_once, apart, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_prompt_equals_its_tokens_one_by_one(library, set_threads, kv_dtype):
    """Each alone in its step, on three threads that share its partitions."""
    lengths = [150, 20]
    shape = Shape(head_dim=80, window=100)
    world = World(shape, lengths, torch.bfloat16, kv_dtype=kv_dtype)
    set_threads(1)
    at_once, _ = world.run(whole(lengths), library)
    set_threads(3)
    singly, _ = world.run(one_by_one(lengths), library)
    for mine, other in zip(at_once, singly, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cache_may_have_a_dtype_of_its_own(library, dtype, kv_dtype):
    lengths = [70, 33]
    world = World(Shape(), lengths, dtype, kv_dtype=kv_dtype)
    steps = [*whole([69, 32]), [(0, 69, 70), (1, 32, 33)]]
    expected, plain = world.run(steps)
    got, tiled = world.run(steps, library)
    assert torch.equal(untile(tiled), plain)
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.float(), reference, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtypes", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_no_number_stays_with_its_sequence(library, set_threads, dtypes, num_threads):
    set_threads(num_threads)
    dtype, kv_dtype = dtypes
    lengths = [100, 90, 17]
    world = World(Shape(), lengths, dtype, kv_dtype=kv_dtype)
    steps = [*whole([99, 89, 16]), [(0, 99, 100), (1, 89, 90), (2, 16, 17)]]
    clean, _ = world.run(steps, library)
    world.sequences[1].qkv[40] = float("nan")
    spoiled, _ = world.run(steps, library)
    assert torch.equal(spoiled[0], clean[0])
    assert torch.equal(spoiled[2], clean[2])
    assert spoiled[1][40:].isnan().all(), "what attends to no number is none"


def test_no_other_block_is_read_or_written(library):
    lengths = [100, 20]
    world = World(Shape(), lengths)
    own = torch.zeros(NUM_BLOCKS, dtype=torch.bool)
    own[[block for sequence in world.sequences for block in sequence.block_ids]] = True
    expected, _ = world.run(whole(lengths), library)
    cache = world.empty_cache()
    cache[:, :, ~own] = float("nan")
    got = world.step(cache, whole(lengths)[0], library)
    assert cache[:, :, ~own].isnan().all()
    for mine, reference in zip(got, expected, strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_an_int8_row_that_is_no_number_spoils_whoever_sees_it_and_nobody_else(
    library, set_threads, part, bad, num_threads
):
    """However small its weight, and although others' weights of it are 0."""
    set_threads(num_threads)
    shape = Shape(window=30, scale=8.0)
    world = World(shape, [200], kv_dtype="int8")
    (clean,), _ = world.run(whole([200]), library)
    row = {"query": 0, "key": -2 * shape.kv_heads, "value": -shape.kv_heads}[part]
    world.sequences[0].qkv[70, row, 5] = bad
    for steps in (whole([200]), mixed([200], 1), one_by_one([200])):
        (spoiled,), _ = world.run(steps, library)
        seen = torch.zeros(clean.shape, dtype=torch.bool)
        if part == "query":
            seen[70, 0] = True
        else:
            seen[70:100, : shape.group] = True
        assert spoiled[seen].isnan().all()
        assert torch.equal(spoiled[~seen], clean[~seen])


@settings(deadline=None, max_examples=10)
@given(shape=shapes, lengths=many_lengths, seed=seeds)
def test_what_an_int8_block_held_before_changes_no_bit(library, shape, lengths, seed):
    """Scales that are NaN, infinite or huge included: blocks are given out as they were left."""
    world = World(shape, lengths, kv_dtype="int8")
    steps = mixed(lengths, seed)
    expected, _ = world.run(steps, library)
    used = world.empty_cache().random_(-128, 128)
    scales = torch.tensor([float("nan"), float("inf"), float("-inf"), 3e38]).view(torch.int8)
    used[:, :, ::2, :, :, -4:] = scales.view(4, 4).repeat(shape.block_size // 4, 1)
    got, _ = world.run(steps, library, tile(used))
    for mine, reference in zip(got, expected, strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_int8_rows_of_any_size(library, size):
    """Their scales are the least ones, or their reciprocals beyond float32."""
    world = World(Shape(), [150], kv_dtype="int8")
    qkv = world.sequences[0].qkv
    qkv[:, -world.shape.kv_heads :] *= size
    (expected,), plain = world.run(whole([150]))
    (got,), tiled = world.run(whole([150]), library)
    assert torch.equal(untile(tiled), plain)
    torch.testing.assert_close(got, expected, atol=1e-3 * size + 1e-28, rtol=0)
    qkv[:, : -world.shape.kv_heads] *= size
    (got,), _ = world.run(whole([150]), library)
    assert got.isfinite().all() or size == 1e30, "whose scores are infinite"


def test_large_scores_do_not_overflow(library):
    world = World(Shape(scale=1000.0, softcap=50.0), [90])
    expected, _ = world.run(whole([90]))
    got, _ = world.run(whole([90]), library)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "config_changes"),
    [
        ({"head_dim": 24}, {}),
        ({"block_size": 24}, {}),
        ({"dtype": "fp8"}, {}),
        ({}, {"is_causal": False}),
    ],
)
def test_what_the_kernels_cannot_attend_to_stays_plain(changes, config_changes):
    layout = Shape().layout("float32")
    config = Shape().config
    assert can_attend(layout.head_dim)
    for dtype in ("float32", "bfloat16", "int8"):
        assert native_layout(replace(layout, dtype=dtype), config).inner_order == "tiles16"
    other = replace(layout, **changes)
    assert native_layout(other, replace(config, **config_changes)) == other
