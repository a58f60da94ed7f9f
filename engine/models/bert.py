"""BERT (arXiv:1810.04805), RoBERTa and XLM-R: encoders that embed text, and, with a
classification head, score it (cross-encoders).

A token of a pair's second text comes as its id + vocab_size: token types then need no tensor of
their own on the way here (engine/pooling.py writes them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from core.errors import ConfigError, ModelLoadError
from core.model_config import ModelConfig
from engine.kernels import AttentionPlan
from engine.models.layers import MLP, Attention, LayerNorm
from parallel.embedding import VocabParallelEmbedding
from parallel.groups import Placement
from parallel.linear import ColumnParallelLinear, OutputPart
from parallel.weights import StoredTensor


class BertEmbeddings(nn.Module):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        settings = config.settings
        size = config.hidden_size
        plain = replace(placement, quantization=None)  # small, and added to every token
        self.vocab_size = config.vocab_size
        num_positions = settings.integer("max_position_embeddings")
        self.first_position = num_positions - config.max_model_len
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, size, placement=placement)
        self.position_embeddings = VocabParallelEmbedding(num_positions, size, placement=plain)
        self.token_type_embeddings = VocabParallelEmbedding(
            settings.integer("type_vocab_size", 2), size, placement=plain
        )
        self.norm = LayerNorm(size, config.norm_eps, placement=placement)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[T] both -> [T, hidden_size]."""
        embedded = (
            self.word_embeddings(token_ids % self.vocab_size)
            + self.token_type_embeddings(token_ids // self.vocab_size)
            + self.position_embeddings(positions + self.first_position)
        )
        out: Tensor = self.norm(embedded)
        return out


class BertLayer(nn.Module):
    """Norms come after the sums, unlike in all later models."""

    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__()
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, placement=placement)
        self.attention = Attention(config, layer, placement=placement)
        self.attention_norm = norm()
        self.mlp = MLP(config, placement=placement)
        self.mlp_norm = norm()

    def forward(self, hidden: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        hidden = self.attention_norm(hidden + self.attention(hidden, None, kv_layer, plan))
        out: Tensor = self.mlp_norm(hidden + self.mlp(hidden))
        return out


class ClassificationHead(nn.Module):
    """First token's hidden state [num_rows, hidden_size] -> logits [num_rows, num_labels]. Whole on
    every rank and, being small, never quantised."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        self.dense = _whole_linear(config.hidden_size, config.hidden_size, placement)
        self.out_proj = _whole_linear(config.hidden_size, config.num_labels, placement)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.out_proj(torch.tanh(self.dense(hidden)))
        return out


def _whole_linear(in_features: int, out_features: int, placement: Placement) -> nn.Module:
    part = OutputPart("", out_features, range(out_features))
    plain = replace(placement, quantization=None)
    return ColumnParallelLinear(in_features, (part,), bias=True, placement=plain)


class BertModel(nn.Module):
    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        "layers.": "encoder.layer.",
        "embeddings.norm.": "embeddings.LayerNorm.",
        "attention.qkv_proj.q.": "attention.self.query.",
        "attention.qkv_proj.k.": "attention.self.key.",
        "attention.qkv_proj.v.": "attention.self.value.",
        "attention.o_proj.": "attention.output.dense.",
        "attention_norm.": "attention.output.LayerNorm.",
        "mlp.up_proj.": "intermediate.dense.",
        "mlp.down_proj.": "output.dense.",
        "mlp_norm.": "output.LayerNorm.",
        "head.dense.": "pooler.dense.",
        "head.out_proj.": "classifier.",
    }
    PREFIX: ClassVar[str] = "bert."
    UNUSED: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "pooler.", "cls.", "lm_head.")
    """What pretraining and others' pooling leave in a file."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        if placement.stage.count > 1:
            raise ConfigError(
                f"{config.architecture} models do not run in pipeline stages, and "
                f"pipeline_parallel_size is {placement.stage.count}"
            )
        self.embeddings = BertEmbeddings(config, placement=placement)
        self.layers = nn.ModuleList(
            BertLayer(config, layer, placement=placement) for layer in range(config.num_layers)
        )
        self.head = ClassificationHead(config, placement=placement) if config.num_labels else None

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        settings = config.settings
        if settings.flag("is_decoder", False):
            raise ModelLoadError("is_decoder: BERT as a decoder is not supported")
        if settings.string("position_embedding_type", "absolute") != "absolute":
            raise ModelLoadError("position_embedding_type: only absolute positions are supported")
        classifies = any(
            "SequenceClassification" in a for a in settings.items("architectures", str)
        )
        return replace(
            config,
            is_causal=False,
            attention_bias=True,
            output_bias=True,
            num_token_types=settings.integer("type_vocab_size", 2),
            num_labels=(len(settings.nested("id2label")) or 2) if classifies else 0,
            hidden_act=settings.string("hidden_act", "gelu"),
        )

    def adapt(self, checkpoint: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        """Files of the bare model lack the prefix; the oldest call norms' weights otherwise."""
        return {
            name.removeprefix(self.PREFIX)
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias"): stored
            for name, stored in checkpoint.items()
        }

    def ignores(self, name: str) -> bool:
        return name.startswith(self.UNUSED)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        hidden: Tensor | None = None,
    ) -> Tensor:
        assert hidden is None, "an encoder is one stage"
        hidden = self.embeddings(token_ids, positions)
        for layer, kv_layer in zip(self.layers, kv_cache, strict=True):
            hidden = layer(hidden, kv_layer, plan)
        return hidden

    def normalize(self, hidden: Tensor) -> Tensor:
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Of the classification head: [num_rows, hidden_size] -> [num_rows, num_labels] float32."""
        assert self.head is not None, "an encoder without a classification head has no logits"
        logits: Tensor = self.head(hidden)
        return logits.float()


class RobertaModel(BertModel):
    """Also XLM-R: positions count from the padding token's id + 1, texts of a pair are not told
    apart by token type, and the head has its own dense layer."""

    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        **BertModel.CHECKPOINT_NAMES,
        "head.dense.": "classifier.dense.",
        "head.out_proj.": "classifier.out_proj.",
    }
    PREFIX: ClassVar[str] = "roberta."

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        first = config.settings.integer("pad_token_id", 1) + 1
        return replace(
            super().configure(config),
            max_model_len=config.max_model_len - first,
            num_token_types=1,
        )
