"""Qwen2-MoE (arXiv:2407.10671): Qwen2 with experts in the place of most MLPs, and beside them one
expert that sees every token, behind a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from core.model_config import ModelConfig, ModelSettings
from engine.models.decoder import optional_windows
from engine.models.layers import GatedMLP
from engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from engine.models.moe import Router, SparseMoE
from parallel.groups import Placement


class SharedExpertMoE(SparseMoE):
    """The shared expert's output is scaled by one sigmoid per token."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        settings = config.settings
        super().__init__(
            config,
            num_experts=_num_experts(settings),
            top_k=settings.size("num_experts_per_tok", 4),
            intermediate_size=settings.size("moe_intermediate_size", 1408),
            normalize=settings.flag("norm_topk_prob", False),
            placement=placement,
        )
        size = settings.size("shared_expert_intermediate_size", 5632)
        self.shared_expert = GatedMLP(config, intermediate_size=size, placement=placement)
        self.shared_expert_gate = Router(config.hidden_size, 1, placement=placement)

    def forward(self, hidden: Tensor) -> Tensor:
        scale: Tensor = self.shared_expert_gate(hidden).sigmoid()
        shared: Tensor = self.shared_expert(hidden)
        return super().forward(hidden) + scale * shared


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        bias = config.settings.flag("qkv_bias", True)
        windows = _windows(config)
        return replace(config, attention_bias=bias, output_bias=False, sliding_windows=windows)

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        sparse = _is_sparse(config.settings, layer)
        mlp = SharedExpertMoE(config, placement=placement) if sparse else None
        return LlamaDecoderLayer(config, layer, mlp=mlp, placement=placement)


def _windows(config: ModelConfig) -> tuple[int | None, ...]:
    """On every other layer below max_window_layers, where Qwen2 has them from there on."""
    end = config.settings.integer("max_window_layers", 28)
    return optional_windows(config, lambda layer: layer % 2 == 0 and layer < end)


def _is_sparse(settings: ModelSettings, layer: int) -> bool:
    step = settings.size("decoder_sparse_step", 1)
    listed = layer in settings.items("mlp_only_layers", int)
    return not listed and _num_experts(settings) > 0 and (layer + 1) % step == 0


def _num_experts(settings: ModelSettings) -> int:
    return settings.integer("num_experts", settings.integer("num_local_experts", 60))
