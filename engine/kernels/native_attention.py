"""Attention by the CPU kernels, for models that run operator by operator."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from core.kv import KVLayout
from core.model_config import ModelConfig
from cpu_kernels.attention import SequenceShares, can_attend, paged_attention
from engine.batch import ForwardInputs
from engine.kernels.torch_attention import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeAttentionPlan:
    """For a cache in tile order."""

    library: ctypes.CDLL
    shares: SequenceShares
    scale: float
    softcap: float | None
    num_threads: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, window: Window
    ) -> Tensor:
        return paged_attention(
            self.library,
            query,
            key,
            value,
            kv_layer,
            self.shares,
            scale=self.scale,
            window=window,
            softcap=self.softcap,
            num_threads=self.num_threads,
        )


def plan_native(
    inputs: ForwardInputs, config: ModelConfig, library: ctypes.CDLL, *, num_threads: int
) -> NativeAttentionPlan:
    query_lens = np.array(inputs.query_lens, np.int32)
    return NativeAttentionPlan(
        library=library,
        shares=SequenceShares(
            query_lens=query_lens,
            num_computed=np.array(inputs.seq_lens, np.int32) - query_lens,
            block_tables=inputs.block_tables.numpy().astype(np.int32),
        ),
        scale=config.softmax_scale,
        softcap=config.attn_logit_softcap,
        num_threads=num_threads,
    )


def native_layout(layout: KVLayout, config: ModelConfig) -> KVLayout:
    """`layout` in the order that the CPU kernels attend to; as it is where they cannot."""
    tiled = replace(layout, inner_order="tiles16")
    attends = config.is_causal and can_attend(layout.head_dim) and tiled.order_fault() is None
    return tiled if attends else layout
