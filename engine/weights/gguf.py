"""Stored tensors of a GGUF file, under Hugging Face names, dequantised as they are read. Types that
parallel/quantization.py has too (Q8_0, Q4_0, Q4_1) can also be read as they are.

llama.cpp rotates neighbouring elements where Hugging Face rotates halves, so its converter permutes
the rows of q and k of llama-type models; here they are read back in Hugging Face's order.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from core.errors import ModelLoadError
from core.gguf_file import GGUFFile, GGUFTensor, read_gguf
from parallel.quantization import GROUP_SIZE, Groups
from parallel.weights import StoredTensor

PERMUTED_ARCHITECTURES = ("llama", "mistral", "smollm3", "granite")

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
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
"""Of architectures where a GGUF name means another tensor."""


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
        values = self._dequantize(self._encoded(rows))
        return _tensor(values if columns is None else values[:, columns])

    def _encoded(self, rows: slice) -> np.ndarray:
        return self._raw[rows if self._row_order is None else self._row_order[rows]]

    def _dequantize(self, raw: np.ndarray) -> np.ndarray:
        try:
            return dequantize(raw, self._type)
        except NotImplementedError as error:
            raise ModelLoadError(f"tensor {self._name}: {error}") from error


class GGUFQuantizedTensor(GGUFStoredTensor):
    """One whose blocks are groups: parallel.weights.QuantizedTensor."""

    def __init__(self, gguf: GGUFFile, tensor: GGUFTensor) -> None:
        super().__init__(gguf, tensor)
        self.bits = 8 if self._type == GGMLQuantizationType.Q8_0 else 4

    def read_groups(self, rows: slice, columns: slice | None = None) -> Groups:
        _, block_bytes = GGML_QUANT_SIZES[self._type]
        blocks = self._encoded(rows).reshape(rows.stop - rows.start, -1, block_bytes)
        if columns is not None:
            assert columns.start % GROUP_SIZE == 0 == columns.stop % GROUP_SIZE, f"{columns}"
            blocks = blocks[:, columns.start // GROUP_SIZE : columns.stop // GROUP_SIZE]
        return _BLOCK_READERS[self._type](blocks)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(
        np.require(values, np.float32, ["C", "W"])
    )  # copies off the read-only map


# Blocks [rows, blocks per row, bytes], of GROUP_SIZE elements each; ggml-common.h has their layout.


def _q8_0(blocks: np.ndarray) -> Groups:
    codes = np.array(blocks[..., 2:]).view(np.int8)  # a copy, off the read-only map
    return Groups(torch.from_numpy(codes).flatten(1), _float16(blocks[..., :2]))


def _q4_0(blocks: np.ndarray) -> Groups:
    """scale * (code - 8): a power of two times the scale is as exact in float16 as the scale."""
    scales = _float16(blocks[..., :2])
    return Groups(_nibbles(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(blocks: np.ndarray) -> Groups:
    return Groups(_nibbles(blocks[..., 4:]), _float16(blocks[..., :2]), _float16(blocks[..., 2:4]))


def _float16(pairs: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(pairs).view(np.float16)).squeeze(-1)


def _nibbles(packed: np.ndarray) -> Tensor:
    """Low nibbles are a block's first half, high ones its second."""
    codes = np.concatenate((packed & np.uint8(0x0F), packed >> np.uint8(4)), axis=-1)
    return torch.from_numpy(codes).flatten(1)


_BLOCK_READERS: Mapping[GGMLQuantizationType, Callable[[np.ndarray], Groups]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
}


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
    arch = gguf.string("general.architecture")
    return {
        checkpoint_name(name, arch): _stored(gguf, tensor) for name, tensor in gguf.tensors.items()
    }


def _stored(gguf: GGUFFile, tensor: GGUFTensor) -> GGUFStoredTensor:
    quantized = tensor.ggml_type in _BLOCK_READERS
    return (GGUFQuantizedTensor if quantized else GGUFStoredTensor)(gguf, tensor)


def checkpoint_name(name: str, arch: str = "") -> str:
    """Hugging Face's name; an unknown name stays, so that an error shows it as the file does."""
    if name in _NAMES:
        return _NAMES[name]
    layer_names = {**_LAYER_NAMES, **_OTHER_LAYER_NAMES.get(arch, {})}
    match name.split("."):
        case ["blk", layer, part, kind] if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{kind}"
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
