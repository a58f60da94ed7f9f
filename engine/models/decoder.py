"""The frame of a decoder-only model: embedding, layers, norm, LM head. A family brings its layer.
A stage of a pipeline builds only its part; layers keep their numbers in the whole model.

Module names are Hugging Face's, so that a checkpoint's names are the modules' own paths; only
projections that we merge are named otherwise (CHECKPOINT_NAMES).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.kernels import AttentionPlan, softcap
from engine.models.layers import RMSNorm
from engine.models.rotary import RotaryEmbedding, Rotation
from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.groups import Placement
from parallel.weights import StoredTensor


class DecoderModel(nn.Module):
    """What a checkpoint calls `model`."""

    embed_tokens: VocabParallelEmbedding
    """Only of the first stage, and of the last one where the LM head shares its weight."""
    norm: nn.Module
    """Only of the last stage."""

    def __init__(
        self, config: ModelConfig, layers: Mapping[int, nn.Module], *, placement: Placement
    ) -> None:
        super().__init__()
        stage = placement.stage
        if stage.is_first or (stage.is_last and config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, placement=placement
            )
        self.rotary = RotaryEmbedding(config, placement=placement)
        self.layers = nn.ModuleDict({f"{layer}": module for layer, module in layers.items()})


class CausalLM(nn.Module):
    """A Model (engine/models/interface.py, which says what its members mean), base of the decoder
    families. A family brings `make_layer` and overrides what else differs: `configure`,
    `make_norm`, `embed`, `rotations`, `adapt`, `ignores`, CHECKPOINT_NAMES.
    """

    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        "qkv_proj.q.": "q_proj.",
        "qkv_proj.k.": "k_proj.",
        "qkv_proj.v.": "v_proj.",
        "gate_up_proj.gate.": "gate_proj.",
        "gate_up_proj.up.": "up_proj.",
    }
    lm_head: ParallelLMHead
    """Only of the last stage."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.final_logit_softcap = config.final_logit_softcap
        self._tied = config.tie_word_embeddings
        layers = {
            layer: self.make_layer(config, layer, placement=placement)
            for layer in placement.stage.layers(config.num_layers)
        }
        self.model = DecoderModel(config, layers, placement=placement)
        if placement.stage.is_last:
            self.model.norm = self.make_norm(config, placement=placement)
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                tied=self.model.embed_tokens if self._tied else None,
                placement=placement,
            )

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return config

    def make_layer(self, config: ModelConfig, layer: int, *, placement: Placement) -> nn.Module:
        """forward(hidden, rotation, kv_layer, plan) -> hidden."""
        raise NotImplementedError

    def make_norm(self, config: ModelConfig, *, placement: Placement) -> nn.Module:
        """The norm before the LM head."""
        return RMSNorm(config.hidden_size, config.norm_eps, placement=placement)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[T] both -> [T, hidden_size]: what enters the first layer."""
        hidden: Tensor = self.model.embed_tokens(token_ids)
        return hidden

    def rotations(self, positions: Tensor) -> Sequence[Rotation | None]:
        """One per layer of the whole model; None rotates nothing."""
        rotation: Rotation = self.model.rotary(positions)
        return (rotation,) * self.num_layers

    def adapt(self, checkpoint: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        return checkpoint

    def ignores(self, name: str) -> bool:
        tied = name == "lm_head.weight" and self._tied
        return tied or name.endswith("rotary_emb.inv_freq")

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        hidden: Tensor | None = None,
    ) -> Tensor:
        if hidden is None:
            hidden = self.embed(token_ids, positions)
        rotations = self.rotations(positions)
        for (layer, module), kv_layer in zip(self.model.layers.items(), kv_cache, strict=True):
            hidden = module(hidden, rotations[int(layer)], kv_layer, plan)
        return hidden

    def normalize(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.model.norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.normalize(hidden))
        return softcap(logits.float(), self.final_logit_softcap)


def optional_windows(
    config: ModelConfig, is_windowed: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Of a family whose windows `use_sliding_window` switches on: on the layers that layer_types
    names, or, where it is absent, on those that `is_windowed`."""
    settings = config.settings
    if not settings.flag("use_sliding_window", False) or "sliding_window" not in settings:
        return ()
    plain = [
        "sliding_attention" if is_windowed(layer) else "full_attention"
        for layer in range(config.num_layers)
    ]
    return layer_windows(config, settings.items("layer_types", str) or plain)


def layer_windows(config: ModelConfig, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer, of Hugging Face's layer_types. Raises ModelLoadError for a kind
    that we do not know."""
    return tuple(_window(config, kind) for kind in kinds)


def _window(config: ModelConfig, kind: str) -> int | None:
    if kind == "sliding_attention":
        return config.settings.integer("sliding_window")
    if kind == "full_attention":
        return None
    raise ModelLoadError(f"attention kind {kind!r} is not supported")
