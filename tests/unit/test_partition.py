"""Partitions cover the whole exactly once, in order, and refuse what cannot be split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import ParallelConfig
from core.errors import ConfigError
from core.model_files import load_model_config
from parallel.partition import (
    check_shape,
    even_range,
    expert_range,
    head_range,
    kv_head_range,
    layer_range,
    vocab_range,
    vocab_shard_size,
)

sizes = st.integers(1, 64)


def joined(part, total, size):
    return [index for rank in range(size) for index in part(total, rank, size)]


@given(total=st.integers(1, 200), size=sizes)
def test_layers_cover_exactly_and_differ_by_at_most_one(total, size):
    if size > total:
        with pytest.raises(ConfigError, match="pipeline stages"):
            layer_range(total, 0, size)
        return
    assert joined(layer_range, total, size) == list(range(total))
    counts = [len(layer_range(total, rank, size)) for rank in range(size)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(share=st.integers(1, 50), size=sizes)
def test_even_shares_cover_exactly(share, size):
    assert joined(even_range, share * size, size) == list(range(share * size))
    assert joined(head_range, share * size, size) == list(range(share * size))


@given(total=st.integers(1, 500), size=sizes)
def test_what_is_not_divisible_is_refused(total, size):
    if total % size:
        with pytest.raises(ConfigError, match=f"{total} attention heads"):
            head_range(total, 0, size)


@given(num_kv_heads=st.integers(1, 16), factor=st.integers(1, 8), group=st.integers(1, 8))
def test_replicated_kv_heads_serve_their_query_heads(num_kv_heads, factor, group):
    size = num_kv_heads * factor
    num_heads = size * group  # query heads per kv head: factor * group
    for rank in range(size):
        [kv_head] = kv_head_range(num_kv_heads, rank, size)
        for head in head_range(num_heads, rank, size):
            assert head // (factor * group) == kv_head


@given(share=st.integers(1, 8), size=sizes)
def test_kv_heads_are_split_like_query_heads_while_there_are_enough(share, size):
    assert joined(kv_head_range, share * size, size) == list(range(share * size))


def test_kv_heads_that_cannot_be_replicated_are_refused():
    with pytest.raises(ConfigError, match="3 kv heads"):
        kv_head_range(3, 0, 4)


@given(vocab_size=st.integers(1, 5000), size=sizes)
def test_vocabulary_covers_exactly_and_fits_the_shard(vocab_size, size):
    assert joined(vocab_range, vocab_size, size) == list(range(vocab_size))
    shard = vocab_shard_size(vocab_size, size)
    ranges = [vocab_range(vocab_size, rank, size) for rank in range(size)]
    assert all(len(r) <= shard for r in ranges)
    assert all(r.start == rank * shard for rank, r in enumerate(ranges) if r)


@pytest.mark.parametrize(
    ("tp", "pp", "reason"),
    [
        (1, 1, None),
        (3, 2, None),
        (9, 1, "1536 features"),
        (2, 1, "9 attention heads cannot be split over 2"),
        (6, 1, "9 attention heads"),
        (1, 31, "30 layers cannot be split into 31 pipeline stages"),
    ],
)
def test_shapes_of_a_model(tp, pp, reason, smollm2_path):
    shape = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    model = load_model_config(smollm2_path)
    if reason is None:
        check_shape(model, shape)
    else:
        with pytest.raises(ConfigError, match=reason):
            check_shape(model, shape)


@given(sizes, sizes)
def test_every_expert_is_whole_on_one_rank(num_experts, size):
    if size > num_experts:
        with pytest.raises(ConfigError, match=f"{num_experts} experts cannot be spread"):
            expert_range(num_experts, 0, size)
        return
    ranges = [expert_range(num_experts, rank, size) for rank in range(size)]
    assert [number for one in ranges for number in one] == list(range(num_experts))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
