"""What families are built of: norms, attention, MLPs. Flags of ModelConfig and a few
arguments are all that differs between families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.kernels import (
    AttentionPlan,
    gelu_and_mul,
    layer_norm,
    paged_attention,
    rms_norm,
    rope,
    silu_and_mul,
)
from engine.models.rotary import Rotation
from parallel.groups import Placement
from parallel.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    parameter,
)
from parallel.weights import StoredTensor, WeightSlot, copy_shard


class RMSNorm(nn.Module):
    """`offset` is added to the stored weight once, at load (Gemma stores weight - 1); the sum is
    kept in float32, since bfloat16 would lose much of a small stored weight."""

    def __init__(self, size: int, eps: float, *, placement: Placement, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        dtype = torch.float32 if offset else placement.dtype
        self.weight = parameter(replace(placement, dtype=dtype), size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(self.weight.dtype), self.weight, self.eps).to(x.dtype)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot("weight", tuple(self.weight.shape), self._load)

    def _load(self, stored: StoredTensor) -> None:
        copy_shard(self.weight, stored)
        self.weight.add_(self.offset)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, placement: Placement, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(placement, size)
        self.bias = parameter(placement, size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def weight_slots(self) -> Iterator[WeightSlot]:
        for name, target in self.named_parameters():
            yield WeightSlot(name, tuple(target.shape), partial(copy_shard, target))


class Attention(nn.Module):
    """[T, hidden_size] -> [T, hidden_size]; writes the step's keys and values to kv_layer.

    `rotation` None: no position is rotated in (SmolLM3's NoPE layers, learned positions).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        placement: Placement,
        norm: Callable[..., nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_window(layer)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_attention_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.attention_bias,
            placement=placement,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.output_bias,
            placement=placement,
        )
        head_norm = partial(norm, config.head_dim, config.norm_eps, placement=placement)
        self.q_norm = head_norm() if config.qk_norm else None
        self.k_norm = head_norm() if config.qk_norm else None

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        query, key = self.norm_heads(query, key)
        if rotation is not None:
            query, key = rope(query, *rotation), rope(key, *rotation)
        attended = paged_attention(query, key, value, kv_layer, plan, self.sliding_window)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out

    def norm_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """[T, num_heads, head_dim] and [T, num_kv_heads, head_dim], before they are rotated."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)


_Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: Mapping[str, _Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
GATED_ACTIVATIONS: Mapping[str, _Activation] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_and_mul,
}


def _activation(table: Mapping[str, _Activation], name: str) -> _Activation:
    if name not in table:
        raise ModelLoadError(f"activation {name!r} is not supported; supported: {', '.join(table)}")
    return table[name]


class MLP(nn.Module):
    """Up, activation, down, with biases. Raises ModelLoadError at construction for an activation
    we do not have."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        self.act = _activation(ACTIVATIONS, config.hidden_act)
        self.up_proj = MergedColumnParallelLinear(
            config.hidden_size, config.intermediate_size, ("",), bias=True, placement=placement
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=True, placement=placement
        )

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.up_proj(hidden)))
        return out


class GatedMLP(nn.Module):
    """act(gate) * up, then down. Raises as MLP does."""

    def __init__(
        self, config: ModelConfig, *, placement: Placement, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        self.act_and_mul = _activation(GATED_ACTIVATIONS, config.hidden_act)
        size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, size, ("gate", "up"), bias=config.mlp_bias, placement=placement
        )
        self.down_proj = RowParallelLinear(
            size, config.hidden_size, bias=config.mlp_bias, placement=placement
        )

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_and_mul(self.gate_up_proj(hidden)))
        return out
