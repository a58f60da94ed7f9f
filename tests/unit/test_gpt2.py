"""GPT-2 against transformers, and the ways its files differ among themselves."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelLoadError


@pytest.fixture
def model(gpt2_model):
    return gpt2_model


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


def test_equals_transformers(folder, model, make_runner, drive, prompts, assert_equals_hf):
    rows = drive(make_runner(str(folder)), prompts, num_tokens=32)
    assert_equals_hf(rows, model)
    distinct = {token for row in rows for token in row.tokens[len(row.prompt) :]}
    assert len(distinct) > 10, "a model that repeats itself proves little"


def test_file_of_the_bare_model_with_masks(
    folder, model, make_runner, drive, prompts, assert_equals_hf, change_config
):
    """As openai-community/gpt2 is published: no prefix, causal masks, and no word on tying."""
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128).tril() for layer in range(3)}
    save_file({**bare, **masks}, folder / "model.safetensors")
    change_config(folder, {"tie_word_embeddings": None})
    assert_equals_hf(drive(make_runner(str(folder)), prompts, num_tokens=4), model)


@pytest.mark.parametrize("name", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_what_is_not_supported_is_refused(name, folder, make_runner, change_config):
    change_config(folder, {name: True})
    with pytest.raises(ModelLoadError, match=name):
        make_runner(str(folder))


def test_unknown_activation_is_refused(folder, make_runner, change_config):
    change_config(folder, {"activation_function": "swish"})
    with pytest.raises(ModelLoadError, match="'swish'"):
        make_runner(str(folder))
