"""A run of decoder layers of Llama's shape in one call: the typed face of csrc/stage.h.

Knows tensors and sizes; which models have that shape, engine/fused_stage.py knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_kernels.attention import KV_TYPES
from cpu_kernels.library import check
from cpu_kernels.matmul import Matrix, MatrixStruct

_POINTER = ctypes.c_void_p


class LayerStruct(ctypes.Structure):
    """csrc/stage.h's Layer."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_bias", _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_norm", _POINTER) for name in ("input", "post_attention", "query", "key")),
        ("window", ctypes.c_int),
        ("rotates", ctypes.c_int),
    )


class ModelStruct(ctypes.Structure):
    """csrc/stage.h's Model."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "rotary_dim",
                "num_layers",
                "vocab_size",
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in ("norm_eps", "attention_scale", "attention_softcap", "rotation_factor")
        ),
        ("inverse_frequencies", _POINTER),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("embedding", MatrixStruct),
        ("head", MatrixStruct),
        ("final_norm", _POINTER),
    )


class CacheStruct(ctypes.Structure):
    """csrc/stage.h's Cache."""

    _fields_ = (
        ("data", _POINTER),
        ("num_blocks", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("kv_type", ctypes.c_int),
    )


class InputsStruct(ctypes.Structure):
    """csrc/stage.h's StepInputs."""

    _fields_ = (
        ("num_tokens", ctypes.c_int),
        ("token_ids", _POINTER),
        ("num_sequences", ctypes.c_int),
        ("query_lens", _POINTER),
        ("num_computed", _POINTER),
        ("block_tables", _POINTER),
        ("table_width", ctypes.c_int),
        ("num_logits", ctypes.c_int),
        ("logits_rows", _POINTER),
    )


class OutputsStruct(ctypes.Structure):
    """csrc/stage.h's StepOutputs."""

    _fields_ = tuple((name, _POINTER) for name in ("hidden", "logits", "likeliest", "finite"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayer:
    """Vectors are float32; None where the layer has none."""

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    input_norm: Tensor
    post_attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None
    rotates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    attention_scale: float
    attention_softcap: float | None
    rotation_factor: float
    """What cos and sin are multiplied by."""
    inverse_frequencies: Tensor
    """[rotary_dim / 2] float32."""
    layers: Sequence[StageLayer]
    embedding: Matrix
    head: Matrix
    final_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInputs:
    """A step's sequences one after another, nothing padded but block_tables."""

    token_ids: NDArray[np.int64]
    query_lens: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    """[num_sequences, width]."""
    logits_rows: NDArray[np.int32]
    """Rows of the flat batch whose logits are wanted."""


class StageOutputs(NamedTuple):
    hidden: Tensor
    """[num_tokens, hidden_size] float32, not normed."""
    logits: Tensor
    """[len(logits_rows), vocab_size] float32."""
    likeliest: Tensor
    """[len(logits_rows)] int64: the lowest id of the largest logit; -1 where that is not finite, or
    one of the row is NaN."""
    finite: Tensor
    """[num_sequences] bool: whether the last row of hidden is."""


class Stage:
    """Weights stay where they are; one step at a time."""

    def __init__(self, model: StageModel, library: ctypes.CDLL) -> None:
        self._library = library
        self._stage = _POINTER()
        self._model = model  # keeps what the structs point to
        layers = (LayerStruct * len(model.layers))(*map(_layer_struct, model.layers))
        struct = ModelStruct(
            model.hidden_size,
            model.intermediate_size,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            2 * len(model.inverse_frequencies),
            len(model.layers),
            model.vocab_size,
            model.norm_eps,
            model.attention_scale,
            model.attention_softcap or 0.0,
            model.rotation_factor,
            _pointer(model.inverse_frequencies),
            layers,
            model.embedding.struct,
            model.head.struct,
            _pointer(model.final_norm),
        )
        check(library.ts_stage_new(ctypes.byref(struct), ctypes.byref(self._stage)))
        self._structs = CacheStruct(), InputsStruct(), OutputsStruct()
        self._arguments = tuple(map(ctypes.byref, self._structs))

    def run(self, inputs: StageInputs, kv_cache: Tensor, *, num_threads: int) -> StageOutputs:
        """Write the step's keys and values into kv_cache, [num_layers, 2, num_blocks, num_kv_heads,
        block_size, row] of attention.KV_TYPES in tiles16 order."""
        num_tokens, num_logits = len(inputs.token_ids), len(inputs.logits_rows)
        hidden = torch.empty((num_tokens, self._model.hidden_size))
        logits = torch.empty((num_logits, self._model.vocab_size))
        likeliest = torch.empty(num_logits, dtype=torch.int64)
        finite = torch.empty(len(inputs.query_lens), dtype=torch.bool)
        outputs = StageOutputs(hidden, logits, likeliest, finite)
        self._point(inputs, kv_cache, outputs)
        check(self._library.ts_stage_run(self._stage, *self._arguments, num_threads))
        return outputs

    def _point(self, inputs: StageInputs, kv_cache: Tensor, outputs: StageOutputs) -> None:
        """Structs are filled anew, not made: half of the call's own cost."""
        cache, step, out = self._structs
        _, _, cache.num_blocks, _, cache.block_size, _ = kv_cache.shape
        cache.data = kv_cache.data_ptr()
        cache.kv_type = KV_TYPES[kv_cache.dtype]
        step.num_tokens = len(inputs.token_ids)
        step.token_ids = inputs.token_ids.ctypes.data
        step.num_sequences, step.table_width = inputs.block_tables.shape
        step.query_lens = inputs.query_lens.ctypes.data
        step.num_computed = inputs.num_computed.ctypes.data
        step.block_tables = inputs.block_tables.ctypes.data
        step.num_logits = len(inputs.logits_rows)
        step.logits_rows = inputs.logits_rows.ctypes.data
        out.hidden, out.logits, out.likeliest, out.finite = (t.data_ptr() for t in outputs)

    def __del__(self) -> None:
        self._library.ts_stage_delete(self._stage)


def _layer_struct(layer: StageLayer) -> LayerStruct:
    return LayerStruct(
        *(matrix.struct for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        *map(
            _pointer,
            (
                layer.qkv_bias,
                layer.output_bias,
                layer.gate_up_bias,
                layer.down_bias,
                layer.input_norm,
                layer.post_attention_norm,
                layer.query_norm,
                layer.key_norm,
            ),
        ),
        layer.window or 0,
        layer.rotates,
    )


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32, f"{tensor.dtype} given to the kernels"
    assert tensor.is_contiguous(), "a strided tensor given to the kernels"
    return tensor.data_ptr()
