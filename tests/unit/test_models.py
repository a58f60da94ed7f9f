"""Every family against Hugging Face transformers with the same weights, in float32: logits, and
greedy tokens, through chunked prefill, mixed batches and scattered blocks."""

import json
import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from core.errors import ConfigError, ModelLoadError
from core.model_files import load_model_config
from engine.models.interface import model_class
from engine.weights.loader import load_weights, open_checkpoint
from parallel.groups import Placement, SingleRank


def test_family_equals_transformers(family, make_runner, drive, prompts, assert_equals_hf):
    model, folder = family
    rows = drive(make_runner(folder), prompts, num_tokens=32)
    assert_equals_hf(rows, model)
    distinct = {token for row in rows for token in row.tokens[len(row.prompt) :]}
    assert len(distinct) > 10, "a model that repeats itself proves little"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_family_on_the_cpu_kernels_equals_transformers(
    wide_family, make_runner, drive, prompts, assert_equals_hf
):
    """In one call for all layers where the kernels know them, else operator by operator. (float32
    itself is 1e-4 from float64 at this width, transformers' too.)"""
    model, folder = wide_family
    runner = make_runner(folder, block_size=16, num_threads=2)
    assert runner.kv_cache.layout.inner_order == "tiles16"
    assert_equals_hf(drive(runner, prompts, num_tokens=16), model, tolerance=3e-4)


@pytest.mark.parametrize(
    "name", ["llama3", "gemma2", "gemma3", "phi4-mini", "qwen2-moe", "olmo2", "granite"]
)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    name, make_hf_model, make_runner, drive, prompts, tmp_path
):
    model = make_hf_model(name)
    model.save_pretrained(tmp_path)
    runner = make_runner(str(tmp_path), dtype="bfloat16")
    assert runner.kv_cache.tensor.dtype == torch.bfloat16
    half = deepcopy(model).bfloat16()
    ours, theirs = [], []
    for row in drive(runner, prompts):
        with torch.no_grad():
            exact, rounded = (
                m(torch.tensor([row.tokens])).logits[0, len(row.prompt) - 1 : -1].float()
                for m in (model, half)
            )
        ours.append((torch.stack(row.logits) - exact).abs().mean())
        theirs.append((rounded - exact).abs().mean())
    assert torch.stack(ours).mean() < 1.2 * torch.stack(theirs).mean()


def test_gemma_rounds_where_transformers_rounds(make_hf_model, tmp_path):
    """The scale of embeddings to bfloat16 (6.9375 for the root of 48), weight + 1 of norms not."""
    half = make_hf_model("gemma2").bfloat16()
    half.save_pretrained(tmp_path)
    read = load_model_config(str(tmp_path))
    cpu = Placement(group=SingleRank(), dtype=torch.bfloat16, device=torch.device("cpu"))
    ours = model_class(read)(model_class(read).configure(read), placement=cpu)
    load_weights(ours, open_checkpoint(str(tmp_path)))
    ids = torch.arange(101)
    embedded = ours.embed(ids, torch.arange(len(ids)))
    assert torch.equal(embedded, half.model.embed_tokens(ids))
    assert torch.equal(ours.normalize(embedded), half.model.norm(embedded))


def test_config_of_every_family_is_read_back(family):
    model, folder = family
    read = load_model_config(folder)
    ours, theirs = model_class(read).configure(read), model.config
    assert ours.architecture == theirs.model_type
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == model.model.layers[0].self_attn.head_dim
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert ours.eos_token_ids == (2,)
    assert ours.max_model_len == 256


def test_unknown_architecture_is_refused_with_what_there_is(family):
    config = replace(load_model_config(family[1]), architecture="gpt_neox")
    with pytest.raises(ModelLoadError, match="'gpt_neox' is not supported; supported: llama"):
        model_class(config)


# -- what a family's settings mean


WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("mistral", {}),
        ("qwen2", WINDOWED),
        ("qwen2_moe", {}),
        ("qwen2_moe", WINDOWED),
        ("qwen3", {}),
        ("smollm3", {}),
        ("smollm3", WINDOWED),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("olmo2", {}),
        ("granite", {}),
    ],
)
def test_settings_left_out_mean_what_transformers_takes_them_for(model_type, flags, tmp_path):
    given = {"hidden_size": 512, "num_hidden_layers": 14, "intermediate_size": 64, **flags}
    theirs = AutoConfig.for_model(model_type, **given)
    named = ["vocab_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
             "max_position_embeddings"]  # fmt: skip
    if model_type != "gemma3_text":  # the one whose published files leave these out
        given |= {name: getattr(theirs, name) for name in named}
    (tmp_path / "config.json").write_text(json.dumps({**given, "model_type": model_type}))
    read = load_model_config(str(tmp_path))
    ours = model_class(read).configure(read)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_attention_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // ours.num_attention_heads)
    assert ours.attn_logit_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.final_logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 14
    expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert (ours.sliding_windows or (None,) * 14) == expected


def test_granite_multipliers_left_out_are_one(
    make_hf_model, make_runner, drive, prompts, assert_equals_hf, change_config, tmp_path
):
    """Also that of the scores, which is not head_dim ** -0.5."""
    names = ("embedding", "attention", "residual")
    keys = [*(f"{name}_multiplier" for name in names), "logits_scaling"]
    model = make_hf_model("granite", **dict.fromkeys(keys, 1.0))
    model.save_pretrained(tmp_path)
    change_config(tmp_path, dict.fromkeys(keys))
    assert_equals_hf(drive(make_runner(str(tmp_path)), prompts), model)


def test_gemma3_with_images_is_served_as_its_language_part(
    make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    model = make_hf_model("gemma3")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=model.config.to_dict(), vision_config=vision)
    whole = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.save_pretrained(tmp_path)
    assert_equals_hf(drive(make_runner(str(tmp_path)), prompts), model)


@pytest.fixture(scope="module")
def long_rope(make_hf_model, tmp_path_factory):
    model = make_hf_model("phi4-mini", original_max_position_embeddings=32)
    folder = tmp_path_factory.mktemp("long")
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.mark.parametrize(("max_model_len", "lengths"), [(32, (1, 4, 9, 17)), (None, (33, 40, 61))])
def test_longrope_rotates_by_the_longest_sequence_served(
    max_model_len, lengths, long_rope, make_runner, drive, assert_equals_hf
):
    """transformers chooses by the length of a pass: short texts and long ones are compared where
    both have chosen the same."""
    model, folder = long_rope
    prompts = [[(7 * i + n) % 101 for i in range(n)] for n in lengths]
    rows = drive(make_runner(folder, max_model_len=max_model_len), prompts, num_tokens=15)
    assert_equals_hf(rows, model)


def test_keys_of_short_and_long_rotation_are_told_apart(long_rope, make_runner):
    short, long = (make_runner(long_rope[1], max_model_len=n) for n in (32, 33))
    assert short.kv_cache.layout.model != long.kv_cache.layout.model
    longer = make_runner(long_rope[1])
    assert longer.kv_cache.layout.model == long.kv_cache.layout.model


def test_older_names_of_longrope(
    long_rope, make_runner, drive, assert_equals_hf, change_config, tmp_path
):
    """As Phi-3's own files write it: beside theta, of another type, without the factor."""
    model, folder = long_rope
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rope = dict(model.config.rope_parameters)
    old = {name: rope[name] for name in ("short_factor", "long_factor")}
    change_config(
        tmp_path,
        {
            "rope_parameters": None,
            "rope_theta": rope["rope_theta"],
            "partial_rotary_factor": rope["partial_rotary_factor"],
            "rope_scaling": {"type": "su", **old},  # and the factor is 256 / 32
        },
    )
    rows = drive(make_runner(str(tmp_path)), [[n % 101 for n in range(40)]])
    assert_equals_hf(rows, model)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama2", {"hidden_act": "relu6"}, "'relu6'"),
        ("llama2", {"model_type": "gpt_neox"}, "'gpt_neox'"),
        ("llama2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama2", {"rope_parameters": {"rope_type": "longrope"}}, "0 rope factors for 4"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama2", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama2", {"rope_parameters": None, "rope_theta": 1.0}, "rope_theta"),
        ("llama2", {"rope_parameters": None, "rope_theta": float("nan")}, "rope_theta"),
        ("llama2", {"num_hidden_layers": 5000}, "num_layers"),
        ("llama2", {"vocab_size": 2**62}, "vocab_size"),
        ("mistral", {"sliding_window": 10**30}, "sliding"),
        ("phi4-mini", {"partial_rotary_factor": 1.5}, "rotary"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        (
            "llama2",
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings",
        ),
        ("llama2", {"rms_norm_eps": None}, "config.json.*rms_norm_eps"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "2 attention kinds for 3 layers"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("qwen2-moe-mixed", {"layer_types": ["chunked_attention"] * 5}, "'chunked_attention'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 of 5 layers"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        ("qwen2-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3-moe", {"moe_intermediate_size": 2**33}, "moe_intermediate_size"),
        ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": None}, "interval is 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0.0"),
        ("olmo2", {"sliding_window": 9}, "sliding_window: OLMo 2 has none"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 3}},
            "3 rope factors for 4",
        ),
    ],
)
def test_what_we_would_run_wrongly_is_refused(
    name, change, message, make_hf_model, make_runner, change_config, tmp_path
):
    make_hf_model(name).save_pretrained(tmp_path)
    change_config(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        make_runner(str(tmp_path))


@pytest.mark.parametrize("wrong", ["x", [[1]], 2**40, True])
def test_ids_that_are_none_are_refused(make_hf_model, change_config, tmp_path, wrong):
    make_hf_model("llama2").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    change_config(tmp_path, {"eos_token_id": wrong})
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        load_model_config(str(tmp_path))


def test_a_negative_id_stands_for_none(make_hf_model, change_config, tmp_path):
    make_hf_model("llama2").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    change_config(tmp_path, {"eos_token_id": [-1, 7]})
    assert load_model_config(str(tmp_path)).eos_token_ids == (7,)


def test_a_stored_head_that_is_not_the_embedding_is_used(
    make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    """As transformers does, although the config says that the two are tied."""
    make_hf_model("smollm2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_equals_hf(drive(make_runner(str(tmp_path)), prompts), reference)
