"""int8 and int4 weights: taken from GGUF blocks without a rounding, or rounded once and well; each
shard on each rank; the model they make is the model with the rounded numbers."""

from copy import deepcopy
from dataclasses import dataclass, replace

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig
from core.errors import ConfigError, ModelLoadError
from engine.weights.gguf import open_gguf
from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.groups import Placement, SingleRank
from parallel.linear import QKVParallelLinear, RowParallelLinear
from parallel.quantization import (
    GROUP_SIZE,
    Groups,
    dequantize,
    pack_int4,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)
from parallel.weight_formats import CHUNK_ELEMENTS, make_weight
from parallel.weights import CHUNK_BYTES

QUANTIZERS = {"int8": quantize_int8, "int4": quantize_int4}
SAME_FORMAT = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}
PLACEMENT = Placement(group=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))


def placed(quantization, **changes):
    return replace(PLACEMENT, quantization=quantization, **changes)


def random_values(*shape, seed=0, scale=0.05):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(values, quantization):
    return dequantize(QUANTIZERS[quantization](values))


def everything(weight):
    return weight.rows(torch.arange(weight.out_features))


@dataclass
class Stored:
    """A stored tensor in memory."""

    tensor: torch.Tensor

    @property
    def shape(self):
        return tuple(self.tensor.shape)

    def read(self, rows, columns=None):
        return self.tensor[rows] if columns is None else self.tensor[rows, columns]


@dataclass
class Rank:
    """As much of a group as loading needs."""

    rank: int
    size: int


@pytest.fixture
def write_blocks(tmp_path):
    """A tensor in a GGUF file: (the stored tensor, its values by the gguf package)."""

    def write(kind, shape=(8, 96), *, name="blk.0.ffn_up.weight", scale=0.05, num_heads=2):
        kind = gguf.GGMLQuantizationType[kind]
        raw = gguf_quantize(random_values(*shape, scale=scale).numpy(), kind)
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_head_count(num_heads)
        writer.add_tensor(name, raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        [stored] = open_gguf(tmp_path / "m.gguf").values()
        return stored, torch.from_numpy(gguf_dequantize(raw, kind).copy())

    return write


# -- arithmetic


@given(st.binary(min_size=64, max_size=64))
def test_packing_is_undone(content):
    codes = torch.tensor(list(content), dtype=torch.uint8).view(2, 32) & 0xF
    packed = pack_int4(codes)
    assert packed.shape == (2, 16)
    assert torch.equal(unpack_int4(packed), codes)


GROUP = st.one_of(
    st.lists(st.floats(-10000, 10000, width=32), min_size=GROUP_SIZE, max_size=GROUP_SIZE),
    st.lists(st.floats(-(2**-17), 2**-17, width=32), min_size=GROUP_SIZE, max_size=GROUP_SIZE),
    st.floats(-100, 100, width=32).map(lambda value: [value] * GROUP_SIZE),
)


@settings(deadline=None, max_examples=200)
@given(group=GROUP)
@pytest.mark.parametrize(("quantization", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1")])
def test_rounding_is_no_worse_than_ggufs(quantization, kind, group):
    """Plain absmax and min-max are what gguf does, with the same scales in float16."""
    values, kind = torch.tensor([group]), gguf.GGMLQuantizationType[kind]
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(gguf_dequantize(gguf_quantize(values.numpy(), kind), kind).copy())
    ours = rounded(values, quantization)
    error, bound = ((x - values).double().square().sum() for x in (ours, theirs))
    assert error <= bound * 1.001 + 1e-20


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.008), ("int4", 0.085)])
def test_relative_error(quantization, limit):
    values = random_values(64, 256)
    error = (rounded(values, quantization) - values).norm() / values.norm()
    assert limit / 2 < error < limit


def test_int4_fit_beats_min_max():
    values = random_values(64, 256)
    kind = gguf.GGMLQuantizationType.Q4_1
    plain = torch.from_numpy(gguf_dequantize(gguf_quantize(values.numpy(), kind), kind).copy())
    assert (rounded(values, "int4") - values).norm() < 0.95 * (plain - values).norm()


def test_values_on_a_grid_stay():
    """A second rounding changes nothing."""
    for quantization in QUANTIZERS:
        once = rounded(random_values(16, 64), quantization)
        torch.testing.assert_close(rounded(once, quantization), once, rtol=0, atol=2e-4)
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    grid = Groups(codes, torch.full((16, 2), 0.25).half(), torch.full((16, 2), -2.0).half())
    assert torch.equal(rounded(dequantize(grid), "int4"), dequantize(grid))


# -- weights


@pytest.mark.parametrize(("kind", "quantization"), SAME_FORMAT.items())
@pytest.mark.parametrize("scale", [0.05, 2e-6, 1e3])
def test_blocks_are_taken_as_they_are(kind, quantization, scale, write_blocks, monkeypatch):
    """Bit for bit; scales below 6e-5 are subnormal in float16."""
    stored, values = write_blocks(kind, scale=scale)
    monkeypatch.setattr(stored, "read", pytest.fail)  # nobody may round
    weight = make_weight(8, 96, placement=placed(quantization))
    weight.load(stored, range(8))
    assert values.count_nonzero()
    assert torch.equal(everything(weight), values)


@pytest.mark.parametrize(("kind", "quantization"), SAME_FORMAT.items())
def test_rows_of_q_and_k_are_permuted_back(kind, quantization, write_blocks):
    stored, values = write_blocks(kind, (16, 64), name="blk.0.attn_q.weight", num_heads=2)
    weight = make_weight(16, 64, placement=placed(quantization))
    weight.load(stored, range(16))
    halves = values.view(2, 4, 2, 64).transpose(1, 2).reshape(16, 64)
    assert torch.equal(everything(weight), halves)
    assert torch.equal(everything(weight), stored.read(slice(0, 16)))


@pytest.mark.parametrize(("kind", "quantization"), SAME_FORMAT.items())
def test_part_of_the_blocks_into_part_of_the_rows(kind, quantization, write_blocks):
    stored, values = write_blocks(kind)
    weight = make_weight(5, 64, placement=placed(quantization))
    weight.load(stored, range(1, 4), first_row=2, first_column=32)
    expected = torch.zeros(5, 64)
    expected[1:4] = values[2:5, 32:]
    assert torch.equal(everything(weight), expected)


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("Q8_0", "int4"), ("Q4_0", "int8"), ("Q4_1", "int8"), ("Q5_1", "int8"), ("F16", "int4")],
)
def test_other_types_are_dequantised_and_rounded(kind, quantization, write_blocks):
    stored, values = write_blocks(kind)
    weight = make_weight(8, 96, placement=placed(quantization))
    weight.load(stored, range(8))
    assert torch.equal(everything(weight), rounded(values, quantization))


@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_bfloat16_is_rounded_in_float32_piece_by_piece(quantization):
    values = random_values(5000, 512).bfloat16()
    assert values.numel() * 4 > 2 * CHUNK_BYTES
    weight = make_weight(5000, 512, placement=placed(quantization))
    weight.load(Stored(values), range(5000))
    assert torch.equal(everything(weight), rounded(values.float(), quantization))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, *QUANTIZERS])
def test_matmul_is_a_product_with_the_rows(quantization, dtype):
    num_rows = 2 * CHUNK_ELEMENTS // 512 + 3
    weight = make_weight(num_rows, 512, placement=placed(quantization, dtype=dtype))
    weight.load(Stored(random_values(num_rows, 512)), range(num_rows))
    x = random_values(2, 3, 512, seed=1, scale=1.0).to(dtype)
    bias = random_values(num_rows, seed=2, scale=1.0).to(dtype)
    for b in (None, bias):
        out = weight.matmul(x, b)
        assert out.dtype == dtype
        torch.testing.assert_close(out, F.linear(x, everything(weight), b))
    picked = torch.tensor([num_rows - 1, 0, 0])
    assert weight.rows(picked).dtype == dtype
    assert torch.equal(weight.rows(picked), everything(weight)[picked])


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.5), ("int4", 5.0)])
def test_size(quantization, bits):
    state = make_weight(64, 128, placement=placed(quantization)).state_dict()
    assert sum(tensor.nbytes for tensor in state.values()) * 8 == bits * 64 * 128


@pytest.mark.parametrize("quantization", QUANTIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_numbers_that_no_scale_holds_are_refused(quantization, bad):
    values = random_values(4, 64)
    values[2, 3] = bad
    weight = make_weight(4, 64, placement=placed(quantization))
    with pytest.raises(ModelLoadError, match="not finite or too large"):
        weight.load(Stored(values), range(4))


def test_features_that_cannot_be_grouped_are_refused():
    with pytest.raises(ConfigError, match=r"int4 weights .* groups of 32 .* has 48 on each rank"):
        make_weight(8, 48, placement=placed("int4"))
    two_ranks = placed("int8", group=Rank(0, 2))
    with pytest.raises(ConfigError, match="has 48 on each rank"):
        RowParallelLinear(96, 8, bias=False, placement=two_ranks)


def test_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="quantization must be int8 or int4, not 'int2'"):
        EngineConfig(model_path="m", quantization="int2")


# -- layers on several ranks


@pytest.mark.parametrize("quantization", QUANTIZERS)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_loads_its_shard(rank, quantization):
    """What a rank rounds is what one rank alone would have rounded."""
    placement = placed(quantization, group=Rank(rank, 2))
    q, k, v, o = (
        random_values(*s, seed=i) for i, s in enumerate([(64, 32), (32, 32)] + [(32, 64)] * 2)
    )
    v = v[:, :32]
    column = QKVParallelLinear(32, 4, 2, 16, bias=False, placement=placement)
    for slot, values in zip(column.weight_slots(), (q, k, v), strict=True):
        slot.load(Stored(values))
    mine = [values.chunk(2)[rank] for values in (q, k, v)]
    assert torch.equal(everything(column.weight), rounded(torch.cat(mine), quantization))
    row = RowParallelLinear(64, 32, bias=False, placement=placement)
    [slot] = row.weight_slots()
    slot.load(Stored(o))
    assert torch.equal(everything(row.weight), rounded(o, quantization).chunk(2, dim=1)[rank])


@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_vocabulary_is_in_int8_and_padded_with_zeros(quantization):
    values = random_values(5, 32)
    placement = placed(quantization, group=Rank(1, 2))
    embedding = VocabParallelEmbedding(5, 32, placement=placement)
    [slot] = embedding.weight_slots()
    slot.load(Stored(values))
    expected = torch.cat((rounded(values[3:], "int8"), torch.zeros(1, 32)))
    assert torch.equal(everything(embedding.weight), expected)
    head = ParallelLMHead(5, 32, tied=embedding, placement=placement)
    assert head.weight is embedding.weight
    assert not list(head.weight_slots())


# -- models


SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("quantization", QUANTIZERS)
@pytest.mark.parametrize("name", ["llama3", "llama-bias", "smollm2", "qwen3"])
def test_model_is_the_model_with_rounded_matrices(
    name, quantization, make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    """Norms and biases stay as they are."""
    model = make_hf_model(name, head_dim=16, **SHAPE)
    model.save_pretrained(tmp_path)
    runner = make_runner(str(tmp_path), quantization=quantization, kernels="torch")
    rows = drive(runner, prompts, num_tokens=8)
    reference = deepcopy(model)
    with torch.no_grad():
        for path, parameter in reference.named_parameters():
            if parameter.dim() == 2:
                vocabulary = "embed_tokens" in path or "lm_head" in path
                parameter.copy_(rounded(parameter, "int8" if vocabulary else quantization))
    assert_equals_hf(rows, reference)


@pytest.mark.parametrize("quantization", QUANTIZERS)
@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"kernels": "auto"}])
def test_rounded_activations(
    quantization, changes, make_hf_model, make_runner, drive, prompts, tmp_path
):
    """To bfloat16; or, by the CPU kernels where they can be built, to 8 bits."""
    make_hf_model("llama3", **SHAPE).save_pretrained(tmp_path)
    runners = [
        make_runner(str(tmp_path), quantization=quantization, **{"kernels": "torch", **flags})
        for flags in ({}, changes)
    ]
    rows = [drive(runner, prompts, num_tokens=1) for runner in runners]
    exact, near = (torch.stack([row.logits[0] for row in some]) for some in rows)
    assert (near - exact).norm() < 0.05 * exact.norm()
    assert not torch.equal(near, exact)
