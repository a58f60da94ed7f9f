"""Stored tensors of a GGUF file, under Hugging Face names, dequantised as they are read.

llama.cpp rotates neighbouring elements where Hugging Face rotates halves, so its converter permutes
the rows of q and k of llama-type models; here they are read back in Hugging Face's order.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from core.errors import ModelLoadError
from core.gguf_file import GGUFFile, GGUFTensor, read_gguf
from parallel.weights import StoredTensor

PERMUTED_ARCHITECTURES = ("llama", "mistral")

_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "model.rotary.factors",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFStoredTensor:
    """One tensor of a mapped file."""

    def __init__(self, gguf: GGUFFile, tensor: GGUFTensor) -> None:
        self.shape = tensor.shape
        self._name = tensor.name
        self._type = _quantization_type(tensor)
        self._raw = _raw_rows(gguf.data, tensor, self._type)
        self._row_order = _row_order(gguf, tensor)

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        if len(self.shape) == 1:  # stored as one row
            values = self._dequantize(self._raw).reshape(-1)
            return _tensor(values[rows if self._row_order is None else self._row_order[rows]])
        stored = rows if self._row_order is None else self._row_order[rows]
        values = self._dequantize(self._raw[stored])
        return _tensor(values if columns is None else values[:, columns])

    def _dequantize(self, raw: np.ndarray) -> np.ndarray:
        try:
            return dequantize(raw, self._type)
        except NotImplementedError as error:
            raise ModelLoadError(f"tensor {self._name}: {error}") from error


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(
        np.require(values, np.float32, ["C", "W"])
    )  # copies off the read-only map


def _quantization_type(tensor: GGUFTensor) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(tensor.ggml_type)
    except ValueError as error:
        raise ModelLoadError(f"tensor {tensor.name}: unknown type {tensor.ggml_type}") from error


def _raw_rows(data: mmap.mmap, tensor: GGUFTensor, kind: GGMLQuantizationType) -> np.ndarray:
    """[rows, bytes per row] uint8, a view of the map."""
    if len(tensor.shape) not in (1, 2) or 0 in tensor.shape:
        raise ModelLoadError(f"tensor {tensor.name}: shape {list(tensor.shape)} is not possible")
    try:
        byte_shape = quant_shape_to_byte_shape(tensor.shape, kind)
    except ValueError as error:
        raise ModelLoadError(f"tensor {tensor.name}: {error}") from error
    count = math.prod(byte_shape)
    if tensor.offset + count > len(data):
        raise ModelLoadError(f"tensor {tensor.name} runs past the end of the file")
    raw = np.frombuffer(data, np.uint8, count=count, offset=tensor.offset)
    return raw.reshape(-1, byte_shape[-1])


def open_gguf(path: Path) -> Mapping[str, StoredTensor]:
    """Raises ModelLoadError for a damaged file or a type that cannot be dequantised."""
    gguf = read_gguf(path)
    if gguf.integer("split.count", 1) > 1:
        raise ModelLoadError(f"{path}: one part of a split GGUF; merge it first (gguf-split)")
    return {
        checkpoint_name(name): GGUFStoredTensor(gguf, tensor)
        for name, tensor in gguf.tensors.items()
    }


def checkpoint_name(name: str) -> str:
    """Hugging Face's name; an unknown name stays, so that an error shows it as the file does."""
    if name in _NAMES:
        return _NAMES[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return name


def _row_order(gguf: GGUFFile, tensor: GGUFTensor) -> np.ndarray | None:
    """Stored row of each row of a permuted tensor, None for all others. A stored head has its rows
    in the order (0, D/2, 1, D/2 + 1, ...)."""
    arch = gguf.string("general.architecture")
    parts = tensor.name.split(".")
    if arch not in PERMUTED_ARCHITECTURES or not {"attn_q", "attn_k"} & set(parts):
        return None
    num_heads = gguf.integer(f"{arch}.attention.head_count")
    if "attn_k" in parts:
        num_heads = gguf.integer(f"{arch}.attention.head_count_kv", num_heads)
    if num_heads < 1 or tensor.shape[0] % (2 * num_heads):
        raise ModelLoadError(f"tensor {tensor.name}: {tensor.shape[0]} rows for {num_heads} heads")
    rows = np.arange(tensor.shape[0]).reshape(num_heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)
