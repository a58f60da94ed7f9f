"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with experts in the place of most MLPs."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from core.model_config import ModelConfig, ModelSettings
from engine.models.llama import LlamaDecoderLayer, Qwen3ForCausalLM
from engine.models.moe import SparseMoE
from parallel.groups import Placement


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """One window for all layers, unlike Qwen3."""
        settings = config.settings
        windowed = settings.flag("use_sliding_window", False) and "sliding_window" in settings
        window = settings.integer("sliding_window") if windowed else None
        return replace(config, qk_norm=True, sliding_windows=(window,) * config.num_layers)

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        mlp = _make_moe(config, placement) if _is_sparse(config.settings, layer) else None
        return LlamaDecoderLayer(config, layer, mlp=mlp, placement=placement)


def _is_sparse(settings: ModelSettings, layer: int) -> bool:
    return layer not in settings.items("mlp_only_layers", int) and (
        (layer + 1) % settings.size("decoder_sparse_step", 1) == 0
    )


def _make_moe(config: ModelConfig, placement: Placement) -> SparseMoE:
    settings = config.settings
    # transformers 5 writes num_local_experts where the published checkpoints say num_experts.
    num_experts = settings.integer("num_experts", settings.integer("num_local_experts", 128))
    return SparseMoE(
        config,
        num_experts=num_experts,
        top_k=settings.size("num_experts_per_tok", 8),
        intermediate_size=settings.size("moe_intermediate_size", 768),
        normalize=settings.flag("norm_topk_prob", False),
        placement=placement,
    )
