"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3. They differ by flags of
ModelConfig: biases, tied embeddings, query and key norms, rope scaling, sliding window.

Module names are Hugging Face's, so that a checkpoint's names are the modules' own paths; only
projections that we merge are named otherwise (CHECKPOINT_NAMES).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.kernels import AttentionPlan, paged_attention, rms_norm, rope, silu_and_mul
from engine.models.rotary import RotaryEmbedding, Rotation
from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.groups import Placement
from parallel.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    parameter,
)
from parallel.weights import WeightSlot, copy_shard


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(placement, size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot("weight", tuple(self.weight.shape), partial(copy_shard, self.weight))


class LlamaAttention(nn.Module):
    """[T, hidden_size] -> [T, hidden_size]; writes the step's keys and values to kv_layer."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        self.head_dim = config.head_dim
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
        norm = partial(RMSNorm, config.head_dim, config.rms_norm_eps, placement=placement)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None

    def forward(
        self, hidden: Tensor, rotation: Rotation, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rope(query, *rotation), rope(key, *rotation)
        attended = paged_attention(query, key, value, kv_layer, plan)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            config.intermediate_size,
            ("gate", "up"),
            bias=config.mlp_bias,
            placement=placement,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            placement=placement,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
        return out


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, placement=placement)
        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(config, placement=placement)
        self.post_attention_layernorm = norm()
        self.mlp = LlamaMLP(config, placement=placement)

    def forward(
        self, hidden: Tensor, rotation: Rotation, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, kv_layer, plan)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, placement=placement
        )
        self.rotary = RotaryEmbedding(config, placement=placement)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, placement=placement) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement=placement)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, plan: AttentionPlan
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(token_ids)
        rotation: Rotation = self.rotary(positions)
        for layer, kv_layer in zip(self.layers, kv_cache, strict=True):
            hidden = layer(hidden, rotation, kv_layer, plan)
        return hidden


class LlamaForCausalLM(nn.Module):
    """Raises ModelLoadError at construction for a flag the family does not have."""

    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        "qkv_proj.q.": "q_proj.",
        "qkv_proj.k.": "k_proj.",
        "qkv_proj.v.": "v_proj.",
        "gate_up_proj.gate.": "gate_proj.",
        "gate_up_proj.up.": "up_proj.",
    }
    """Our name of a slot -> the checkpoint's, where they differ."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ModelLoadError(f"activation {config.hidden_act!r} is not supported; only silu is")
        self.model = LlamaModel(config, placement=placement)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
            placement=placement,
        )

    def ignores(self, name: str) -> bool:
        """Tensors some checkpoints hold and nobody needs."""
        tied = name == "lm_head.weight" and self.lm_head.tied
        return tied or name.endswith("rotary_emb.inv_freq")

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """token_ids and positions [T], kv_cache as KVCache.tensor -> [T, hidden_size]."""
        hidden: Tensor = self.model(token_ids, positions, kv_cache, plan)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        logits: Tensor = self.lm_head(self.model.norm(hidden))
        return logits.float()
