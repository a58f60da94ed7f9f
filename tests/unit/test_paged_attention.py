"""Paged attention against a per-token loop that knows nothing of blocks, batches or masks."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout
from core.model_config import ModelConfig
from core.sampling_params import SamplingParams
from engine.batch import Batch, SampleSpec, ScheduledSequence, build_inputs
from engine.kernels import (
    gelu_and_mul,
    layer_norm,
    paged_attention,
    plan_attention,
    rms_norm,
    rope,
    silu_and_mul,
    softcap,
)

CPU = torch.device("cpu")
NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 3, 8, 4, 64
LAYOUT = KVLayout(
    model="m",
    dtype="float32",
    block_size=BLOCK_SIZE,
    first_layer=0,
    num_layers=1,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
)


def share(name, token_ids, num_computed_tokens, block_ids, *, sample=False):
    spec = SampleSpec(
        sampling=SamplingParams(), choice_index=0, position=num_computed_tokens + len(token_ids)
    )
    return ScheduledSequence(
        request_id=name,
        token_ids=tuple(token_ids),
        num_computed_tokens=num_computed_tokens,
        block_ids=tuple(block_ids),
        samples=(spec,) if sample else (),
    )


def model_config(**flags):
    """One layer; what its attention needs to know."""
    return ModelConfig(
        architecture="llama",
        vocab_size=1,
        hidden_size=NUM_KV_HEADS * GROUP * HEAD_DIM,
        intermediate_size=1,
        num_layers=flags.pop("num_layers", 1),
        num_attention_heads=NUM_KV_HEADS * GROUP,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_model_len=100,
        norm_eps=1e-5,
        **flags,
    )


def naive(query, keys, values, position, window, config):
    """query [H, D]; keys and values [L, K, D] -> [H, D], one head at a time."""
    first = 0 if window is None else max(0, position - window + 1)
    scale, cap = config.attention_scale or HEAD_DIM**-0.5, config.attn_logit_softcap
    out = torch.empty_like(query)
    for head in range(query.shape[0]):
        kv_head = head // GROUP
        scores = keys[first : position + 1, kv_head].double() @ query[head].double() * scale
        scores = scores if cap is None else (scores / cap).tanh() * cap
        weights = scores.softmax(0)
        out[head] = (weights @ values[first : position + 1, kv_head].double()).to(out)
    return out


class World:
    """Random keys and values of a few sequences, stored in shuffled blocks."""

    def __init__(self, lengths, dtype=torch.float32, seed=0, **flags):
        self.config = model_config(**flags)
        generator = torch.Generator().manual_seed(seed)

        def draw(length, heads):
            return torch.randn(length, heads, HEAD_DIM, generator=generator).to(dtype)

        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.cache = torch.zeros(1, 2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
        self.sequences = [
            SimpleNamespace(
                query=draw(length, NUM_KV_HEADS * GROUP),
                key=draw(length, NUM_KV_HEADS),
                value=draw(length, NUM_KV_HEADS),
                block_ids=[free.pop() for _ in range(-(-length // BLOCK_SIZE))],
                computed=0,
            )
            for length in lengths
        ]

    def step(self, counts, window=None):
        """Compute the next counts[i] tokens of sequence i (0: not in the batch) in a layer of that
        window; returns pairs of (got, expected) per sequence of the batch."""
        chosen = [(s, n) for s, n in zip(self.sequences, counts, strict=True) if n]
        batch = Batch(
            sequences=tuple(
                share(str(i), [0] * n, s.computed, s.block_ids) for i, (s, n) in enumerate(chosen)
            )
        )
        inputs = build_inputs(batch, block_size=BLOCK_SIZE, device=CPU)
        plan = plan_attention(inputs, LAYOUT, NUM_BLOCKS, self.config, None, dtype=self.cache.dtype)
        parts = [
            torch.cat([getattr(s, name)[s.computed : s.computed + n] for s, n in chosen])
            for name in ("query", "key", "value")
        ]
        out = paged_attention(*parts, self.cache[0], plan, window)
        pairs = []
        for (s, n), got in zip(chosen, out.split([n for _, n in chosen]), strict=True):
            rows = range(s.computed, s.computed + n)
            expected = [
                naive(s.query[row], s.key, s.value, row, window, self.config) for row in rows
            ]
            pairs.append((got, torch.stack(expected)))
            s.computed += n
        return pairs


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
    scale=st.none() | st.just(0.2),
    cap=st.none() | st.just(1.5),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_chunking_and_mixing_equals_the_loop(lengths, windows, scale, cap, seed, data):
    """One plan serves layers of several windows; which one is asked differs by step."""
    world = World(
        lengths,
        seed=seed,
        num_layers=len(windows),
        sliding_windows=tuple(windows),
        attention_scale=scale,
        attn_logit_softcap=cap,
    )
    while any(s.computed < len(s.query) for s in world.sequences):
        counts = [data.draw(st.integers(0, len(s.query) - s.computed)) for s in world.sequences]
        if not any(counts):
            counts = [min(1, len(s.query) - s.computed) for s in world.sequences]
        for got, expected in world.step(counts, data.draw(st.sampled_from(windows))):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_near_float32():
    world = World([33, 20], dtype=torch.bfloat16)
    for counts in ([32, 19], [1, 1]):
        for got, expected in world.step(counts):
            torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_no_value_of_another_sequence_can_reach_a_row():
    """Lengths differ, so the batch is padded; every block that is not the sequence's own is NaN."""
    world = World([5, 30])
    world.step([4, 29])
    own = [block for s in world.sequences for block in s.block_ids]
    poison = torch.ones(NUM_BLOCKS, dtype=torch.bool)
    poison[own] = False
    world.cache[:, :, poison] = float("nan")
    for got, expected in world.step([1, 1]):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_sees_what_follows():
    world = World([6, 1], is_causal=False)
    s = world.sequences[0]
    got, _ = world.step([6, 1])[0]
    expected = [naive(query, s.key, s.value, 5, None, world.config) for query in s.query]
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_only_the_slots_of_the_step_are_written():
    world = World([10])
    world.step([6])
    before = world.cache.clone()
    world.step([1])
    changed = (world.cache != before).any(dim=-1)[0, 0].any(dim=1).nonzero().tolist()
    assert changed == [[world.sequences[0].block_ids[1], 2]]


def test_build_inputs_lays_sequences_one_after_another():
    batch = Batch(
        sequences=(
            share("a", [11, 12, 13], 4, [9, 7, 5], sample=True),
            share("b", [21], 0, [3], sample=False),
            share("c", [31], 8, [1, 2, 4, 6], sample=True),
        )
    )
    inputs = build_inputs(batch, block_size=4, device=CPU)
    assert inputs.token_ids.tolist() == [11, 12, 13, 21, 31]
    assert inputs.positions.tolist() == [4, 5, 6, 0, 8]
    assert inputs.slot_mapping.tolist() == [28, 29, 30, 12, 16]
    assert inputs.block_tables.tolist() == [[9, 7, 7], [3, 3, 3], [1, 2, 4]]
    assert inputs.sample_rows.tolist() == [2, 4]
    assert inputs.query_starts == (0, 3, 4)
    assert inputs.query_lens == (3, 1, 1)
    assert inputs.seq_lens == (7, 1, 9)
    assert inputs.num_blocks == (2, 1, 3)


@pytest.mark.parametrize(("token_ids", "block_ids"), [([1] * 5, [0]), ([], [0])])
def test_a_share_that_does_not_fit_its_blocks_is_a_bug(token_ids, block_ids):
    batch = Batch(sequences=(share("a", token_ids, 0, block_ids),))
    with pytest.raises(AssertionError, match="a"):
        build_inputs(batch, block_size=4, device=CPU)


def test_elementwise_kernels_follow_their_definitions():
    x = torch.randn(5, 6, 8, dtype=torch.float64)
    weight = torch.randn(8, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(layer_norm(x, weight, None, 1e-5), expected)
    torch.testing.assert_close(layer_norm(x, weight, weight, 1e-5), expected + weight)

    angles = torch.randn(5, 1, 4, dtype=torch.float64)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    rotated = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(rope(x, cos, sin), rotated)
    longer = torch.cat((x, x), -1)  # rotated in part
    torch.testing.assert_close(rope(longer, cos, sin), torch.cat((rotated, x), -1))

    gate, up = x[:, 0], x[:, 1]
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), -1)), expected)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = gate / 2 * (1 + inner.tanh()) * up
    torch.testing.assert_close(gelu_and_mul(torch.cat((gate, up), -1)), expected)

    torch.testing.assert_close(softcap(x, 0.5), 0.5 * (x / 0.5).tanh())
    assert softcap(x, None) is x
