"""Mixtral (arXiv:2401.04088): Mistral with experts in the place of every MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from core.model_config import ModelConfig
from engine.models.llama import LlamaDecoderLayer, MistralForCausalLM
from engine.models.moe import SparseMoE
from parallel.groups import Placement


class MixtralForCausalLM(MistralForCausalLM):
    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        **MistralForCausalLM.CHECKPOINT_NAMES,
        "mlp.": "block_sparse_moe.",
        "gate_proj.": "w1.",
        "up_proj.": "w3.",
        "down_proj.": "w2.",
    }

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        settings = config.settings
        moe = SparseMoE(
            config,
            num_experts=settings.integer("num_local_experts", 8),
            top_k=settings.size("num_experts_per_tok", 2),
            intermediate_size=config.intermediate_size,
            normalize=True,
            placement=placement,
        )
        return LlamaDecoderLayer(config, layer, mlp=moe, placement=placement)
