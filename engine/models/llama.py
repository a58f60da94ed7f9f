"""Llama 2 and 3 and what is built like them: SmolLM2, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from core.model_config import ModelConfig
from engine.kernels import AttentionPlan
from engine.models.decoder import CausalLM, optional_windows
from engine.models.layers import Attention, GatedMLP, RMSNorm
from engine.models.rotary import Rotation
from parallel.groups import Placement


class LlamaDecoderLayer(nn.Module):
    """`norm`: the kind of both; `mlp` takes the place of the gated one."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        placement: Placement,
        norm: Callable[..., nn.Module] = RMSNorm,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        make_norm = partial(norm, config.hidden_size, config.norm_eps, placement=placement)
        self.input_layernorm = make_norm()
        self.self_attn = Attention(config, layer, placement=placement)
        self.post_attention_layernorm = make_norm()
        self.mlp = mlp or GatedMLP(config, placement=placement)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, kv_layer, plan)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class LlamaForCausalLM(CausalLM):
    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        return LlamaDecoderLayer(config, layer, placement=placement)


class MistralForCausalLM(LlamaForCausalLM):
    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """One window for all layers; null (in GGUF files 0) means none."""
        window = config.settings.integer("sliding_window", 0) or None
        return replace(config, sliding_windows=(window,) * config.num_layers)


class Qwen2ForCausalLM(LlamaForCausalLM):
    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Bias on q, k and v always; windows on the layers from max_window_layers on."""
        return replace(
            config, attention_bias=True, output_bias=False, sliding_windows=qwen_windows(config)
        )


class Qwen3ForCausalLM(LlamaForCausalLM):
    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return replace(config, qk_norm=True, sliding_windows=qwen_windows(config))


def qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    num_full = config.settings.integer("max_window_layers", 28)
    return optional_windows(config, lambda layer: layer >= num_full)
