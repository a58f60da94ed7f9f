"""Every family against Hugging Face transformers with the same weights, in float32: logits, and
greedy tokens, through chunked prefill, mixed batches and scattered blocks."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from core.errors import ConfigError, ModelLoadError
from core.model_config import ARCHITECTURES, load_model_config
from engine.models.registry import MODELS, build_model
from parallel.groups import Placement, SingleRank

PLACEMENT = Placement(group=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))


def test_family_equals_transformers(family, make_runner, drive, prompts, assert_equals_hf):
    model, folder = family
    rows = drive(make_runner(folder), prompts)
    assert_equals_hf(rows, model)
    distinct = {token for row in rows for token in row.tokens[len(row.prompt) :]}
    assert len(distinct) > 10, "a model that repeats itself proves little"


def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    make_hf_model, make_runner, drive, prompts, tmp_path
):
    model = make_hf_model("llama3")
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


def test_config_of_every_family_is_read_back(family):
    model, folder = family
    ours, theirs = load_model_config(folder), model.config
    assert ours.architecture == theirs.model_type
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == model.model.layers[0].self_attn.head_dim
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (2,)
    assert ours.max_model_len == 256


def test_registry_serves_what_core_lets_through(family):
    assert set(MODELS) == set(ARCHITECTURES)
    config = replace(load_model_config(family[1]), architecture="gpt2")
    with pytest.raises(ModelLoadError, match="'gpt2' is not supported; supported: llama"):
        build_model(config, placement=PLACEMENT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"model_type": "gpt_neox"}, "'gpt_neox'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rms_norm_eps": None}, "config.json"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            "sliding-window",
        ),
    ],
)
def test_what_we_would_run_wrongly_is_refused(
    change, message, make_hf_model, make_runner, change_config, tmp_path
):
    make_hf_model("llama2").save_pretrained(tmp_path)
    change_config(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        make_runner(str(tmp_path))
