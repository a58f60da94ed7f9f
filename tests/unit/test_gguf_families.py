"""GGUF files of the families whose tensors or settings llama.cpp's converter changes or leaves out.
Written here as it writes them, under the gguf package's own names."""

import gguf
import pytest
import torch
from gguf.quants import quantize

from core.model_files import load_model_config
from engine.models.stored import split_rows
from engine.weights.gguf import PERMUTED_ARCHITECTURES, open_gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def interleaved(array, num_heads):
    """What the converter does to q and k of llama-like models."""
    halves = array.reshape(num_heads, 2, -1, array.shape[1])
    return halves.swapaxes(1, 2).reshape(array.shape)


def as_converted(name, parameter, arch, config):
    array = parameter.detach().numpy()
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return array + 1
    if arch in PERMUTED_ARCHITECTURES and "q_proj" in name:
        return interleaved(array, config.num_attention_heads)
    if arch in PERMUTED_ARCHITECTURES and "k_proj" in name:
        return interleaved(array, config.num_key_value_heads)
    return array


def write_gguf(path, model, arch, *, settings, tensors=(), kind=None):
    """`settings` are added to those that all architectures have."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    common = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    for name, value in {**common, **settings}.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        (writer.add_string if isinstance(value, str) else add)(f"{arch}.{name}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        array = as_converted(name, parameter, arch, config)
        if kind is not None and array.ndim == 2:
            array = quantize(array, kind)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(theirs, array, raw_dtype=kind if array.ndim == 2 else None)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, torch.tensor(values).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


GEMMA2 = {"attention.key_length": 12, "attention.sliding_window": 9,
          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}  # fmt: skip
GEMMA3 = {"attention.key_length": 12, "attention.sliding_window": 9, "rope.freq_base": 1e6,
          "final_logit_softcapping": 1.5}  # fmt: skip
SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
FILES = {
    "smollm3": ("smollm3", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 12}, GEMMA2),
    # The size whose scores are scaled otherwise: only its number of layers tells.
    "gemma2-27b": ("gemma2", {"query_pre_attn_scalar": 8, "num_hidden_layers": 46}, GEMMA2),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 12}, GEMMA3),
    "gemma3-scaled": (
        "gemma3",
        {"query_pre_attn_scalar": 12, "rope_parameters": SCALED},
        {**GEMMA3, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
         "rope.freq_base_swa": 500.0},
    ),
    "granite": ("granite", {}, {"embedding_scale": 3.0, "attention.scale": 0.2,
                                "residual_scale": 0.4, "logit_scale": 2.5}),
    "olmo2": ("olmo2", {}, {}),
    "phi3": ("phi3", {}, {"attention.sliding_window": 0,
                          "rope.scaling.original_context_length": 256}),
    "phi3-window": ("phi3-window", {}, {"attention.sliding_window": 9,
                                        "rope.scaling.original_context_length": 256}),
}  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_gguf_equals_transformers(
    file, make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    name, changes, settings = FILES[file]
    model = make_hf_model(name, **changes)
    rope = {"rope.freq_base": model.config.rope_parameters.get("rope_theta", 0.0)}
    arch = name.partition("-")[0]
    path = write_gguf(tmp_path / "m.gguf", model, arch, settings={**rope, **settings})
    # API case A44: without output.weight it is tied. A45: Gemma's norms have their 1 already.
    assert load_model_config(path).tie_word_embeddings == model.config.tie_word_embeddings
    assert_equals_hf(drive(make_runner(path), prompts), model)


@pytest.mark.parametrize(("max_model_len", "lengths"), [(32, (1, 4, 9, 17)), (None, (33, 40, 61))])
def test_phi4_mini_reads_both_sets_of_rope_factors(
    max_model_len, lengths, make_hf_model, make_runner, drive, assert_equals_hf, tmp_path
):
    model = make_hf_model("phi4-mini", original_max_position_embeddings=32)
    rope = model.config.rope_parameters
    settings = {
        "rope.dimension_count": 6,
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": model.model.rotary_emb.attention_scaling,
        "attention.sliding_window": 0,
    }
    tensors = {f"rope_factors_{n}.weight": rope[f"{n}_factor"] for n in ("long", "short")}
    path = write_gguf(tmp_path / "m.gguf", model, "phi3", settings=settings, tensors=tensors)
    prompts = [[(7 * i + n) % 101 for i in range(n)] for n in lengths]
    runner = make_runner(path, max_model_len=max_model_len)
    assert_equals_hf(drive(runner, prompts, num_tokens=15), model)


def test_parts_of_a_quantised_tensor_are_quantised_too(make_hf_model, tmp_path):
    model = make_hf_model("phi3", hidden_size=64, num_attention_heads=4, intermediate_size=96)
    write_gguf(tmp_path / "m.gguf", model, "phi3", settings={}, kind=Q8_0)
    stored = open_gguf(tmp_path / "m.gguf")
    sizes = {"qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32}}
    name = "model.layers.1.self_attn."
    whole = stored[f"{name}qkv_proj.weight"]
    key = split_rows(stored, sizes)[f"{name}k_proj.weight"]
    assert key.shape == (32, 64)
    part, columns = slice(3, 20), slice(32, 64)
    assert torch.equal(key.read(part, columns), whole.read(slice(67, 84), columns))
    expected = whole.read_groups(slice(67, 84), columns)
    for got, want in zip(key.read_groups(part, columns), expected, strict=True):
        assert got is want is None or torch.equal(got, want)
