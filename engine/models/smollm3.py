"""SmolLM3: Llama with layers that rotate no positions into q and k (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.models.decoder import optional_windows
from engine.models.llama import LlamaForCausalLM
from engine.models.rotary import Rotation
from parallel.groups import Placement


class SmolLM3ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__(config, placement=placement)
        self._has_rope = _has_rope(config)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Windows, where they are used, are on the layers without rotation."""
        has_rope = _has_rope(config)
        windows = optional_windows(config, lambda layer: not has_rope[layer])
        return replace(config, sliding_windows=windows)

    def rotations(self, positions: Tensor) -> Sequence[Rotation | None]:
        rotation = self.model.rotary(positions)
        return [rotation if rope else None for rope in self._has_rope]


def _has_rope(config: ModelConfig) -> tuple[bool, ...]:
    """Of each layer. GGUF files say nothing: llama.cpp assumes the default interval."""
    interval = config.settings.size("no_rope_layer_interval", 4)
    plain = tuple(int((layer + 1) % interval != 0) for layer in range(config.num_layers))
    given = config.settings.items("no_rope_layers", int) or plain
    if len(given) < config.num_layers:
        raise ModelLoadError(f"no_rope_layers has {len(given)} of {config.num_layers} layers")
    return tuple(bool(rope) for rope in given[: config.num_layers])
