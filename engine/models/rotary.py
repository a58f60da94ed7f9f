"""Rotary position embedding: frequencies of every supported scaling, and cos/sin of one step.

cos and sin are computed from the positions once per step and shared by all layers: for a step's few
hundred positions that costs microseconds, a table for 131,072 positions costs 128 MB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig, RopeScaling
from parallel.groups import Placement
from parallel.weights import StoredTensor, WeightSlot


class Rotation(NamedTuple):
    """cos and sin of one step, [num_tokens, 1, rotary_dim] each; sin's first half is negated (see
    kernels.reference.rope)."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """[num_tokens] positions -> Rotation in the model's dtype; angles are float32.

    Raises ModelLoadError at construction for what we would rotate wrongly.
    """

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        if rotary_dim(config) == config.head_dim != partial_rotary_dim(config):
            raise ModelLoadError(
                f"setting partial_rotary_factor: {config.architecture} models rotate whole heads"
            )
        self._dtype = placement.dtype
        self.inv_freq = inverse_frequencies(config).to(placement.device)
        self.attention_factor = attention_factor(config.rope_scaling)

    def forward(self, positions: Tensor) -> Rotation:
        angles = positions.unsqueeze(1).float() * self.inv_freq
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(
            cos=torch.cat((cos, cos), dim=-1).unsqueeze(1).to(self._dtype),
            sin=torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(self._dtype),
        )

    def weight_slots(self) -> Iterator[WeightSlot]:
        """GGUF stores llama3 scaling as one divisor per frequency."""
        yield WeightSlot("factors", tuple(self.inv_freq.shape), self._divide, required=False)

    def _divide(self, stored: StoredTensor) -> None:
        factors = stored.read(slice(0, stored.shape[0]))
        self.inv_freq = self.inv_freq / factors.to(self.inv_freq)


def rotary_dim(config: ModelConfig) -> int:
    return config.rotary_dim or config.head_dim


def partial_rotary_dim(config: ModelConfig) -> int:
    """rotary_dim as config.json says it, for families that rotate only a part of each head."""
    if config.is_gguf:
        return rotary_dim(config)
    settings = config.settings
    rope = settings.nested("rope_parameters")
    factor = settings.real("partial_rotary_factor", rope.real("partial_rotary_factor", 1.0))
    return int(config.head_dim * factor)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[rotary_dim / 2] float32, radians per position. Raises ModelLoadError for a scaling we do not
    know: guessing would give wrong tokens."""
    size = rotary_dim(config)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind not in _SCALINGS:
        raise ModelLoadError(
            f"rope scaling {scaling.kind!r} is not supported; supported: {', '.join(_SCALINGS)}"
        )
    return _SCALINGS[scaling.kind](plain, scaling, config)


def _linear(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    return plain / scaling.factor


def _llama3(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, between them a ramp."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """NTK by parts (arXiv:2309.00071): as llama3, but the ramp is linear in the dimension."""

    def dimension(rotations: float) -> float:
        length = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim(config) * math.log(length) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), rotary_dim(config) - 1)
    index = torch.arange(len(plain), dtype=torch.float32)
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * plain / scaling.factor + (1 - stretch) * plain


def _longrope(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """LongRoPE (arXiv:2402.13753): a divisor of its own for each frequency."""
    if config.is_gguf:
        return plain  # until the file's tensor of divisors comes
    if len(scaling.divisors) != len(plain):
        raise ModelLoadError(f"{len(scaling.divisors)} rope factors for {len(plain)} frequencies")
    return plain / torch.tensor(scaling.divisors)


_SCALINGS: Mapping[str, Callable[[Tensor, RopeScaling, ModelConfig], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by."""
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretched = scaling.kind == "yarn" and scaling.factor > 1
    return 0.1 * math.log(scaling.factor) + 1.0 if stretched else 1.0
