"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import ModelLoadError
from core.model_config import ARCHITECTURES, ModelConfig
from engine.models.llama import LlamaForCausalLM
from parallel.groups import Placement

MODELS: Mapping[str, type[LlamaForCausalLM]] = dict.fromkeys(ARCHITECTURES, LlamaForCausalLM)


def build_model(config: ModelConfig, *, placement: Placement) -> LlamaForCausalLM:
    """A model with parameters allocated and not yet filled. Raises ModelLoadError for an
    architecture that is not in MODELS, ConfigError when the group cannot split the model."""
    model = MODELS.get(config.architecture)
    if model is None:
        raise ModelLoadError(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return model(config, placement=placement)
