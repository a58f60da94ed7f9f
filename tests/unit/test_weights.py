"""Loading: every slot once, every tensor used, a few megabytes at a time, or an error that names
the tensor."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelLoadError
from core.model_files import load_model_config
from engine.models.interface import model_class
from engine.weights.loader import load_weights, open_checkpoint, weight_slots
from parallel.groups import WHOLE, PipelineStage, Placement, SingleRank
from parallel.weights import CHUNK_BYTES, copy_shard

PLACEMENT = Placement(group=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))
STAGES = [PipelineStage(index=index, count=3) for index in range(3)]


def build_model(path, **placement):
    config = load_model_config(str(path))
    model = model_class(config)
    return model(model.configure(config), placement=replace(PLACEMENT, **placement))


@pytest.fixture
def folder(make_hf_model, tmp_path):
    make_hf_model("llama2").save_pretrained(tmp_path)
    return tmp_path


def load(folder, progress=None):
    model = build_model(folder)
    load_weights(model, open_checkpoint(str(folder)), progress)
    return model


def load_stage(folder, stage):
    model = build_model(folder, stage=stage)
    whole = build_model(folder, stage=WHOLE, device=torch.device("meta"))
    load_weights(model, open_checkpoint(str(folder)), whole=whole)
    return model


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_sharded_index_equals_single_file(make_hf_model, folder, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    make_hf_model("llama2").save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = load(folder).state_dict(), load(sharded).state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_progress_grows_to_one(folder):
    seen = []
    load(folder, lambda what, fraction: seen.append((what, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert len(fractions) > 20


def test_missing_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensor.*model\.layers\.1\.mlp\.up_proj"):
        load(folder)


def test_untied_model_without_its_head_is_refused(folder):
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensor.*lm_head\.weight"):
        load(folder)


def test_unexpected_tensor_is_named(folder):
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_A": torch.ones(2)}))
    with pytest.raises(ModelLoadError, match=r"no place for 1 tensor.*lora_A"):
        load(folder)


def test_wrong_shape_is_named(folder):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[47\].*\[48\]"):
        load(folder)


def test_leftovers_of_old_checkpoints_are_ignored(folder, change_config):
    """Rotary tables of old converters; a head beside tied embeddings."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(folder)
    change_config(folder, {"tie_word_embeddings": True})
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_damaged_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a readable"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a readable index"),
        ({"weight_map": 3}, "not a readable index"),
        ({"weight_map": {"model.norm.weight": "../model.safetensors"}}, "not a file name"),
        ({"weight_map": {"model.norm.weight": "absent.safetensors"}}, "absent.safetensors"),
        ({"weight_map": {"other.weight": "model.safetensors"}}, "no tensor other.weight"),
    ],
)
def test_bad_index_is_refused(folder, index, message):
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="neither"):
        load(folder)


def test_every_parameter_is_filled(folder):
    """Parameters are allocated uninitialised: whatever stays NaN here was never loaded."""
    model = build_model(folder)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, open_checkpoint(str(folder)))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_slots_bear_the_checkpoints_names(family):
    _, folder = family
    model = build_model(folder)
    slots = weight_slots(model)
    stored = model.adapt(open_checkpoint(folder))
    required = {name for name, slot in slots.items() if slot.required}
    assert required == {name for name in stored if not model.ignores(name)}


@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_the_parts_of_the_whole(folder, change_config, tied):
    change_config(folder, {"tie_word_embeddings": tied})
    whole = load(folder).state_dict()
    parts = [load_stage(folder, stage).state_dict() for stage in STAGES]
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())
    held = Counter(name for part in parts for name in part)
    assert held.keys() == whole.keys()
    embedding = {"model.embed_tokens.weight.values"}
    assert {name for name, count in held.items() if count > 1} == (embedding if tied else set())
    assert {name.split(".")[2] for name in parts[1] if ".layers." in name} == {"1"}
    assert all(".layers." in name for name in parts[1])


def test_slots_of_the_stages_are_those_of_the_whole(family):
    _, folder = family
    slots = [weight_slots(build_model(folder, stage=stage)) for stage in STAGES]
    assert set().union(*slots) == weight_slots(build_model(folder)).keys()
    required = Counter(name for part in slots for name, slot in part.items() if slot.required)
    shared = {name for name, count in required.items() if count > 1}
    assert shared <= {"model.embed_tokens.weight"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.norm.weight", r"lacks 1 tensor.*model\.norm"),
        ("model.layers.1.mlp.up_proj.weight", r"lacks 1 tensor.*model\.layers\.1\.mlp\.up_proj"),
        ("model.layers.3.mlp.up_proj.weight", r"no place for 1 tensor.*model\.layers\.3\.mlp"),
        ("model.layers.1.mlp.up_proj.lora_A", r"no place for 1 tensor.*lora_A"),
    ],
)
def test_every_stage_names_what_is_wrong_in_any(folder, stage, name, message):
    """Missing where it was there, one too many where it was not."""
    edit(folder, lambda t: t.update({name: torch.ones(2)}) if t.pop(name, None) is None else None)
    with pytest.raises(ModelLoadError, match=message):
        load_stage(folder, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_names_a_wrong_shape_of_any(folder, stage):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[47\].*\[48\]"):
        load_stage(folder, stage)


class Recorded:
    """A stored tensor that remembers how much of it was read at once."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.reads = []

    def read(self, rows, columns=None):
        part = self.tensor[rows] if columns is None else self.tensor[rows, columns]
        self.reads.append((rows.stop - rows.start) * self.shape[1] * 4)
        return part


@pytest.mark.parametrize("shape", [(5000, 3000), (4999, 1500)])
def test_large_tensors_are_read_in_pieces(shape):
    stored = Recorded(torch.arange(5000 * 3000, dtype=torch.float32).view(5000, 3000))
    target = torch.empty(shape, dtype=torch.float64)
    copy_shard(target, stored, first_row=1 if shape[0] < 5000 else 0, first_column=0)
    first = 5000 - shape[0]
    assert torch.equal(target, stored.tensor[first:, : shape[1]].double())
    assert len(stored.reads) > 3
    assert max(stored.reads) <= CHUNK_BYTES
