"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama whose files keep q, k and v in one tensor, and gate and
up in another; with partial rotation (Phi-4-mini) and LongRoPE (arXiv:2402.13753).

LongRoPE has two sets of frequencies, for texts up to the length of pretraining and for longer ones.
transformers looks at the length of each forward pass, so that a sequence which grows past the limit
meets cached keys that were rotated otherwise. A paged cache holds keys of one rotation only: which
one is decided once, by the longest sequence that is served, as vLLM does. `max_model_len` at
original_max_position_embeddings (4096 of most models) or below takes the short set, anything above
the long one, for short texts too. The two are told apart by their fingerprint, so that no worker
takes over keys of the other rotation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from core.errors import ModelLoadError
from core.model_config import ModelConfig, ModelSettings, RopeScaling
from engine.models.llama import LlamaForCausalLM, MistralForCausalLM
from engine.models.rotary import partial_rotary_dim
from engine.models.stored import split_rows
from parallel.groups import Placement
from parallel.weights import StoredTensor


class Phi3ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__(config, placement=placement)
        self._config = config

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config = replace(
            MistralForCausalLM.configure(config), rotary_dim=partial_rotary_dim(config)
        )
        scaling = _long_rope(config)
        if scaling is None:
            return config
        kind = "long" if _is_long(config) else "short"
        return replace(config, rope_scaling=scaling, fingerprint=f"{config.fingerprint}-{kind}")

    def adapt(self, checkpoint: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        """GGUF files hold both sets of divisors as tensors."""
        config = self._config
        q_rows, kv_rows = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_kv_heads)
        )
        stored = split_rows(
            checkpoint,
            {
                "qkv_proj": {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
                "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
            },
        )
        chosen, other = ("long", "short") if _is_long(config) else ("short", "long")
        stored.pop(f"rope_factors_{other}.weight", None)
        if f"rope_factors_{chosen}.weight" in stored:
            stored["model.rotary.factors"] = stored.pop(f"rope_factors_{chosen}.weight")
        return stored


def _long_rope(config: ModelConfig) -> RopeScaling | None:
    settings, stretched = config.settings, config.rope_scaling
    if stretched is not None and stretched.kind not in ("longrope", "su", "yarn"):  # all the same
        raise ModelLoadError(f"rope scaling {stretched.kind!r}: Phi-3 models have longrope")
    if config.is_gguf:  # which has tensors of divisors, or plain rotation
        factor = settings.real("attention_factor", 1.0)
        return RopeScaling(kind="longrope", attention_factor=factor)
    if stretched is None:
        return None
    rope = settings.nested("rope_scaling" if "rope_scaling" in settings else "rope_parameters")
    return RopeScaling(
        kind="longrope",
        divisors=rope.reals("long_factor" if _is_long(config) else "short_factor"),
        attention_factor=rope.real("attention_factor", _attention_factor(config, rope)),
    )


def _attention_factor(config: ModelConfig, rope: ModelSettings) -> float:
    """The paper's: more entropy in longer texts, however long the ones that are served."""
    original = _original_len(config)
    if original < 2:
        raise ModelLoadError(f"original_max_position_embeddings is {original}; it must be above 1")
    scale = rope.real("factor", config.max_model_len / original)
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def _original_len(config: ModelConfig) -> int:
    return config.settings.integer("original_max_position_embeddings", config.max_model_len)


def _is_long(config: ModelConfig) -> bool:
    return (config.served_model_len or config.max_model_len) > _original_len(config)
