"""GGUF files written here by the gguf package, and the bundled default model."""

from copy import deepcopy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GgufConfig

from core.errors import ModelLoadError
from core.gguf_file import read_gguf
from core.model_files import load_model_config
from engine.models.interface import model_class
from engine.weights.gguf import checkpoint_name, open_gguf
from engine.weights.loader import load_weights, open_checkpoint, weight_slots
from parallel.groups import Placement, SingleRank
from parallel.quantization import dequantize as dequantize_groups
from parallel.quantization import quantize_int8

F32 = gguf.GGMLQuantizationType.F32
PLACEMENT = Placement(group=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))


def build_model(path):
    config = load_model_config(str(path))
    model = model_class(config)
    return model(model.configure(config), placement=PLACEMENT)


def permuted(array, num_heads):
    """What llama.cpp's converter does to q and k of llama: halves of a head are interleaved."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def ggml_names(arch, num_layers):
    """Hugging Face name -> GGUF name, by the gguf package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], num_layers)
    return lambda name: table.get_name(name, try_suffixes=(".weight", ".bias"))


def write_gguf(path, model, arch, *, kind=F32, extra=None):
    """Save a transformers model as llama.cpp's converter would; matrices in `kind` where their
    rows allow it."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    rename = ggml_names(arch, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if arch == "llama" and "q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        if array.ndim == 2 and kind != F32:
            writer.add_tensor(rename(name), quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(rename(name), array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("llama2", "llama"), ("smollm2", "llama"), ("llama-bias", "llama"), ("qwen2", "qwen2"),
     ("qwen3", "qwen3")],
)  # fmt: skip
def test_gguf_equals_transformers(
    name, arch, make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    model = make_hf_model(name)
    path = write_gguf(tmp_path / "m.gguf", model, arch)
    assert_equals_hf(drive(make_runner(path), prompts), model)


def test_rope_factors_are_llama3_scaling(
    make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    model = make_hf_model("llama3")
    plain = 1.0 / 10000.0 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 2
    path = write_gguf(tmp_path / "m.gguf", model, "llama", extra={"rope_freqs.weight": factors})
    assert load_model_config(path).rope_scaling is None
    assert_equals_hf(drive(make_runner(path), prompts), model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16", "F16"])
def test_quantised_model_loads_permuted_and_merged(kind, make_hf_model, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    model = make_hf_model("llama2", hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
                          intermediate_size=96)  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", model, "llama", kind=kind)
    ours = build_model(path)
    load_weights(ours, open_checkpoint(path))
    for layer, reference in zip(ours.model.layers.values(), model.model.layers, strict=True):
        parts = [reference.self_attn.q_proj, reference.self_attn.k_proj, reference.self_attn.v_proj]
        expected = torch.cat([rounded(part.weight, kind) for part in parts])
        assert torch.equal(layer.self_attn.qkv_proj.weight.values, expected)
        assert torch.equal(
            layer.mlp.down_proj.weight.values, rounded(reference.mlp.down_proj.weight, kind)
        )


@pytest.mark.parametrize(("kind", "quantization"), [("Q8_0", "int8"), ("Q4_0", "int4"),
                                                    ("Q4_1", "int4")])  # fmt: skip
def test_blocks_make_the_same_model_without_being_dequantised(
    kind, quantization, make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    kind = gguf.GGMLQuantizationType[kind]
    model = make_hf_model("smollm2", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", kind=kind)
    reference = deepcopy(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(rounded(parameter, kind))
                if "embed_tokens" in name:  # never below 8 bits
                    parameter.copy_(dequantize_groups(quantize_int8(parameter)))
    runner = make_runner(path, quantization=quantization, kernels="torch")
    assert_equals_hf(drive(runner, prompts, num_tokens=8), reference)


def rounded(weight, kind):
    """Rows are quantised one by one, so the permutation of rows does not matter."""
    return torch.from_numpy(dequantize(quantize(weight.detach().numpy(), kind), kind).copy())


def decodable_types():
    for kind in gguf.GGMLQuantizationType:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind, block, size


@pytest.mark.parametrize(("kind", "block", "size"), list(decodable_types()), ids=str)
def test_every_type_is_read_by_rows_and_columns(kind, block, size, tmp_path):
    """Any part of a tensor equals that part of the whole, decoded at once."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    raw = np.random.default_rng(1).integers(0, 255, (6, 2 * size), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = open_gguf(tmp_path / "m.gguf")["model.layers.0.mlp.up_proj.weight"]
    assert stored.shape == (6, 2 * block)
    with np.errstate(all="ignore"):  # random bits hold NaN and infinite scales
        whole = dequantize(raw, kind)
        part = stored.read(slice(2, 5), slice(block // 2, block + 1))
        np.testing.assert_array_equal(stored.read(slice(0, 6)).numpy(), whole)
    np.testing.assert_array_equal(part.numpy(), whole[2:5, block // 2 : block + 1])


def test_type_that_cannot_be_decoded_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = open_gguf(tmp_path / "m.gguf")["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_up\.weight.*I32"):
        stored.read(slice(0, 2))


def test_names_follow_the_gguf_packages_table(make_hf_model):
    for name, arch in (("llama2", "llama"), ("llama-bias", "llama"), ("qwen3", "qwen3")):
        rename = ggml_names(arch, 3)
        for theirs, _ in make_hf_model(name).named_parameters():
            assert checkpoint_name(rename(theirs)) == theirs
    assert checkpoint_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


@pytest.fixture(scope="module")
def tiny_gguf(make_hf_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, make_hf_model("llama2"), "llama")
    return path


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_give_our_error(data, tiny_gguf, tmp_path_factory):
    """Cut anywhere, or a few header bytes replaced: loaded or refused, never a traceback."""
    content = bytearray(tiny_gguf.read_bytes())
    header = 2000
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for place in data.draw(st.lists(st.integers(0, header), min_size=1, max_size=3)):
            content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        load_model_config(str(path))
        open_gguf(path)
    except ModelLoadError:
        pass


def test_split_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="split GGUF"):
        open_gguf(tmp_path / "m.gguf")


# -- the bundled default model


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_default_model_gives_the_oracles_tokens(quantization, smollm2_path, make_runner, drive):
    """The first row of the oracle (tests/data); all rows run with the engine. In int4 too: the file
    is Q4_1 and its embedding Q8_0, and both are taken as they are."""
    prompt = [216, 5475, 253, 3246, 11181, 654, 441, 325, 3249, 281, 260, 34567, 13867, 30, 198]
    prompt += [62, 30, 3315, 441, 829, 2791, 750, 3832, 3246, 288, 325, 10369, 42457, 476, 13182]
    prompt += [13231]
    runner = make_runner(smollm2_path, block_size=16, quantization=quantization)
    [row] = drive(runner, [prompt], num_tokens=10)
    assert row.tokens[len(prompt) :] == [358, 18, 198, 62, 30, 3315, 441, 803, 253, 3246]


def test_default_model_has_no_tensor_left_over(smollm2_path):
    names = set(read_gguf(Path(smollm2_path)).tensors)
    model = build_model(smollm2_path)
    slots = weight_slots(model)
    assert {checkpoint_name(name) for name in names} == {n for n, s in slots.items() if s.required}


@pytest.mark.slow
def test_default_model_equals_transformers_own_dequantisation(smollm2_path):
    path = Path(smollm2_path)
    reference = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    stored = open_checkpoint(smollm2_path)
    for name, parameter in reference.named_parameters():
        assert torch.equal(stored[name].read(slice(0, parameter.shape[0])), parameter), name
