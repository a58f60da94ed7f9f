"""Granite 3: Llama with a multiplier at the embedding, each residual, the scores and the logits."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.kernels import AttentionPlan
from engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from engine.models.rotary import Rotation
from parallel.groups import Placement


class GraniteDecoderLayer(LlamaDecoderLayer):
    """What attention and MLP add is multiplied first."""

    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__(config, layer, placement=placement)
        self._multiplier = config.settings.real("residual_multiplier", 1.0)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rotation, kv_layer, plan)
        hidden = hidden + attended * self._multiplier
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden)) * self._multiplier
        return out


class GraniteForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__(config, placement=placement)
        self._embedding_multiplier = config.settings.real("embedding_multiplier", 1.0)
        self._logits_scaling = config.settings.real("logits_scaling", 1.0)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        settings = config.settings
        scaling = settings.real("logits_scaling", 1.0)
        if scaling <= 0:
            raise ModelLoadError(f"logits_scaling is {scaling}; it must be positive")
        if config.is_gguf and "attention_multiplier" not in settings:
            return config  # llama.cpp takes head_dim ** -0.5 then, transformers 1
        return replace(config, attention_scale=settings.real("attention_multiplier", 1.0))

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        return GraniteDecoderLayer(config, layer, placement=placement)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return super().embed(token_ids, positions) * self._embedding_multiplier

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) / self._logits_scaling
