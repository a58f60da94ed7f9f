"""GPT-2: learned positions, layer norms, plain MLPs, everything with a bias."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.models.decoder import CausalLM
from engine.models.layers import MLP, LayerNorm
from engine.models.llama import LlamaDecoderLayer
from engine.models.stored import row_slice
from parallel.embedding import VocabParallelEmbedding
from parallel.groups import Placement
from parallel.weights import StoredTensor


class GPT2LMHeadModel(CausalLM):
    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        "model.layers.": "h.",
        "model.embed_tokens.": "wte.",
        "embed_positions.": "wpe.",
        "model.norm.": "ln_f.",
        "input_layernorm.": "ln_1.",
        "post_attention_layernorm.": "ln_2.",
        "self_attn.qkv_proj.": "attn.c_attn.",
        "self_attn.o_proj.": "attn.c_proj.",
        "mlp.up_proj.": "mlp.c_fc.",
        "mlp.down_proj.": "mlp.c_proj.",
    }

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__(config, placement=placement)
        if placement.stage.is_first:
            self.embed_positions = VocabParallelEmbedding(
                config.max_model_len,
                config.hidden_size,
                placement=replace(placement, quantization=None),  # small, and added to every token
            )

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        settings = config.settings
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if settings.flag(name, False):
                raise ModelLoadError(f"{name} is not supported")
        return replace(
            config,
            tie_word_embeddings=settings.flag("tie_word_embeddings", True),
            attention_bias=True,
            output_bias=True,
            attention_scale=None if settings.flag("scale_attn_weights", True) else 1.0,
            hidden_act=settings.string("hidden_act", "gelu_new"),
        )

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        mlp = MLP(config, placement=placement)
        return LlamaDecoderLayer(config, layer, norm=LayerNorm, mlp=mlp, placement=placement)

    def make_norm(self, config: ModelConfig, *, placement: Placement) -> nn.Module:
        return LayerNorm(config.hidden_size, config.norm_eps, placement=placement)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        learned: Tensor = self.embed_positions(positions)
        return super().embed(token_ids, positions) + learned

    def rotations(self, positions: Tensor) -> Sequence[None]:
        return (None,) * self.num_layers

    def adapt(self, checkpoint: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        """Files of the bare model lack the prefix; all hold matrices by input feature and q, k and
        v as one."""
        return {
            part: tensor
            for name, stored in checkpoint.items()
            for part, tensor in _parts(name.removeprefix("transformer."), stored)
        }

    def ignores(self, name: str) -> bool:
        """Old files hold the causal mask."""
        return super().ignores(name) or name.endswith((".attn.bias", ".attn.masked_bias"))


def _parts(name: str, stored: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """What the slots are filled from, by name."""
    if re.search(r"\.c_\w+\.weight$", name):
        stored = Transposed(stored)
    if ".c_attn." not in name:
        yield name, stored
        return
    size = stored.shape[0] // 3
    for index, part in enumerate("qkv"):
        yield (
            name.replace(".c_attn.", f".c_attn.{part}."),
            row_slice(stored, range(index * size, (index + 1) * size)),
        )


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix that is stored as [in_features, out_features]."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1]

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        return self.stored.read(columns or slice(0, self.shape[1]), rows).t()
