"""Stored tensors of a Hugging Face folder: model.safetensors, or the shards of an index.

Files are memory-mapped; reading a slice touches only its pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ModelLoadError
from parallel.weights import StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsTensor:
    """One tensor of an open file."""

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        part: Tensor = self._slice[rows] if columns is None else self._slice[rows, columns]
        return part


def open_safetensors(folder: Path) -> Mapping[str, StoredTensor]:
    """Raises ModelLoadError when a file is missing, damaged or not what the index says."""
    if (folder / INDEX).is_file():
        weight_map = _read_index(folder / INDEX)
        files = {name: _open(folder / name) for name in sorted(set(weight_map.values()))}
        return {name: _tensor(files[file], name, file) for name, file in weight_map.items()}
    if not (folder / SINGLE).is_file():
        raise ModelLoadError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
    file = _open(folder / SINGLE)
    return {name: _tensor(file, name, SINGLE) for name in file.keys()}  # noqa: SIM118


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        assert isinstance(weight_map, dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ModelLoadError(f"{path}: not a readable index ({error!r})") from error
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{path}: {file!r} is not a file name")
    return weight_map


def _open(path: Path) -> Any:
    """safe_open ships without types."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file ({error})") from error


def _tensor(file: Any, name: str, file_name: str) -> SafetensorsTensor:
    try:
        return SafetensorsTensor(file, name)
    except SafetensorError as error:
        raise ModelLoadError(f"{file_name}: no tensor {name} ({error})") from error
