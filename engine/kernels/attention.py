"""Which attention a step runs: torch's over a KV cache in plain order, the CPU kernels' over one in
tile order."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from core.kv import KVLayout
from core.model_config import ModelConfig
from engine.batch import ForwardInputs
from engine.kernels.native_attention import plan_native
from engine.kernels.torch_attention import Window, plan_torch


class AttentionPlan(Protocol):
    """One step's attention, the same for every layer but for the layer's window."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, window: Window
    ) -> Tensor:
        """See paged_attention."""


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_layer: Tensor,
    plan: AttentionPlan,
    window: Window = None,
) -> Tensor:
    """query [T, H, D], key and value [T, K, D], kv_layer [2, num_blocks, K, block_size, R], which
    is written to -> [T, H, D]. `window` is one of the model's."""
    return plan.attend(query, key, value, kv_layer, window)


def plan_attention(
    inputs: ForwardInputs,
    layout: KVLayout,
    num_blocks: int,
    config: ModelConfig,
    library: ctypes.CDLL | None,
    *,
    dtype: torch.dtype,
    num_threads: int | None = None,
) -> AttentionPlan:
    """`layout` and `num_blocks` are the cache's; `dtype` is that of queries. `num_threads` of the
    kernels; None: as many as torch."""
    if layout.inner_order == "plain":
        return plan_torch(inputs, layout, num_blocks, config, dtype=dtype)
    assert library is not None, f"nothing here attends to {layout.inner_order}"
    return plan_native(inputs, config, library, num_threads=num_threads or torch.get_num_threads())
