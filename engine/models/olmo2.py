"""OLMo 2 (arXiv:2501.00656): Llama, but what attention and MLP give is normed instead of what they
take, and q and k are normed over all heads at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.kernels import AttentionPlan
from engine.models.decoder import CausalLM
from engine.models.layers import Attention, GatedMLP, RMSNorm
from engine.models.rotary import Rotation
from parallel.groups import Placement
from parallel.linear import OutputPart, parameter
from parallel.weights import WeightSlot, copy_shard


class AllHeadsNorm(nn.Module):
    """This rank's weights of an RMS norm over the heads of all ranks, q's or k's."""

    def __init__(self, part: OutputPart, *, placement: Placement) -> None:
        super().__init__()
        self.part = part
        self.weight = parameter(placement, len(part.local))

    def forward(self, x: Tensor, inverse: Tensor) -> Tensor:
        """[T, local heads, head_dim] and [T, 1] -> as x."""
        normed = x.flatten(1).float() * inverse * self.weight
        return normed.to(x.dtype).view(x.shape)

    def weight_slots(self) -> Iterator[WeightSlot]:
        load = partial(copy_shard, self.weight, first_row=self.part.local.start)
        yield WeightSlot("weight", (self.part.total,), load)


class Olmo2Attention(Attention):
    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__(config, layer, placement=placement)
        self.group = placement.group
        self.norm_eps = config.norm_eps
        query, key, _ = self.qkv_proj.parts
        self.q_norm = AllHeadsNorm(query, placement=placement)
        self.k_norm = AllHeadsNorm(key, placement=placement)

    def norm_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Ranks hold equally many heads, and copies of a key head equally often: the mean over all
        heads is the mean of the ranks' means."""
        means = [x.flatten(1).float().square().mean(-1, keepdim=True) for x in (query, key)]
        mean = self.group.all_reduce(torch.cat(means, dim=1)) / self.group.size
        inverse = (mean + self.norm_eps).rsqrt()
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(query, inverse[:, :1]), self.k_norm(key, inverse[:, 1:])


class Olmo2DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, placement=placement)
        self.self_attn = Olmo2Attention(config, layer, placement=placement)
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(config, placement=placement)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, hidden: Tensor, rotation: Rotation, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        attended = self.self_attn(hidden, rotation, kv_layer, plan)
        hidden = hidden + self.post_attention_layernorm(attended)
        out: Tensor = hidden + self.post_feedforward_layernorm(self.mlp(hidden))
        return out


class Olmo2ForCausalLM(CausalLM):
    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """GGUF files call OLMo 3 by the same name; only its windows tell."""
        if config.settings.integer("sliding_window", 0):
            raise ModelLoadError("setting sliding_window: OLMo 2 has none (is this OLMo 3?)")
        return replace(config, qk_norm=False)  # which is one per head; GGUF files set it

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        return Olmo2DecoderLayer(config, layer, placement=placement)
