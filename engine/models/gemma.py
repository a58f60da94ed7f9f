"""Gemma 2 (arXiv:2408.00118) and the language part of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from core.model_files import rope_scaling
from engine.kernels import AttentionPlan
from engine.models.decoder import CausalLM, layer_windows
from engine.models.layers import Attention, GatedMLP, RMSNorm
from engine.models.rotary import RotaryEmbedding, Rotation
from parallel.groups import Placement
from parallel.weights import StoredTensor

LAYERS_OF_27B = (46, 62)
"""Of Gemma 2 and Gemma 3: all that GGUF files tell of the one size whose scores are scaled by
another number than head_dim."""


class GemmaDecoderLayer(nn.Module):
    """Norms before and after both attention and MLP."""

    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__()
        head_norm = partial(RMSNorm, offset=_norm_offset(config))
        norm = partial(head_norm, config.hidden_size, config.norm_eps, placement=placement)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer, placement=placement, norm=head_norm)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config, placement=placement)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, hidden: Tensor, rotation: Rotation, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rotation, kv_layer, plan)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        out: Tensor = hidden + self.post_feedforward_layernorm(fed)
        return out


class Gemma2ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__(config, placement=placement)
        # Rounded as the reference rounds it: in bfloat16 the root of 3072 is 55.5.
        self._scale = torch.tensor(config.hidden_size**0.5, dtype=placement.dtype).item()

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Every second layer has a window, the first one too."""
        config = _gemma(config, pattern=2)
        return replace(
            config, attn_logit_softcap=config.settings.optional_real("attn_logit_softcapping")
        )

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        return GemmaDecoderLayer(config, layer, placement=placement)

    def make_norm(self, config: ModelConfig, *, placement: Placement) -> nn.Module:
        return RMSNorm(
            config.hidden_size, config.norm_eps, placement=placement, offset=_norm_offset(config)
        )

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return super().embed(token_ids, positions) * self._scale


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Layers with a window rotate by frequencies of their own, and q and k are normed."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__(config, placement=placement)
        self._local_rotary = RotaryEmbedding(_local(config), placement=placement)
        self._is_local = tuple(window is not None for window in config.sliding_windows)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Five of six layers have a window."""
        if "attn_logit_softcapping" in config.settings:
            raise ModelLoadError("setting attn_logit_softcapping: Gemma 3 has no cap on scores")
        config = _gemma(config, pattern=config.settings.integer("sliding_window_pattern", 6))
        return replace(_rotated(config, "full_attention"), qk_norm=True)

    def rotations(self, positions: Tensor) -> Sequence[Rotation]:
        everywhere, local = self.model.rotary(positions), self._local_rotary(positions)
        return [local if is_local else everywhere for is_local in self._is_local]

    def adapt(self, checkpoint: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        """Without the images' part, where there is one."""
        return {
            name.removeprefix("language_model."): stored
            for name, stored in checkpoint.items()
            if not name.startswith(("vision_tower.", "multi_modal_projector."))
        }


def _gemma(config: ModelConfig, *, pattern: int) -> ModelConfig:
    """What both have; every layer but each `pattern`-th has a window."""
    settings = config.settings
    if settings.flag("use_bidirectional_attention", False):
        raise ModelLoadError("use_bidirectional_attention: only causal Gemma models are supported")
    kinds = tuple(
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(config.num_layers)
    )
    return replace(
        config,
        hidden_act=settings.string("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=_query_scalar(config) ** -0.5,
        final_logit_softcap=settings.optional_real("final_logit_softcapping"),
        sliding_windows=layer_windows(config, settings.items("layer_types", str) or kinds),
    )


def _query_scalar(config: ModelConfig) -> float:
    if not config.is_gguf:
        scalar = config.settings.real("query_pre_attn_scalar", 256.0)
        if scalar <= 0:
            raise ModelLoadError(f"query_pre_attn_scalar is {scalar}; it must be positive")
        return scalar
    if config.num_layers in LAYERS_OF_27B:
        return config.hidden_size / config.num_attention_heads
    return config.head_dim


def _norm_offset(config: ModelConfig) -> float:
    """Norms are stored as weight - 1; llama.cpp's converter has added the 1."""
    return 0.0 if config.is_gguf else 1.0


def _local(config: ModelConfig) -> ModelConfig:
    """As the layers with a window rotate: never stretched, unless transformers 5 says so."""
    theta = config.settings.real("rope_local_base_freq", 10000.0)
    return _rotated(replace(config, rope_theta=theta, rope_scaling=None), "sliding_attention")


def _rotated(config: ModelConfig, kind: str) -> ModelConfig:
    """transformers 5 keeps the rope parameters of each kind of layer apart."""
    rope = config.settings.nested("rope_parameters").nested(kind)
    scaling = rope_scaling(rope, config.max_model_len) or config.rope_scaling
    theta = rope.real("rope_theta", config.rope_theta)
    return replace(config, rope_theta=theta, rope_scaling=scaling)
