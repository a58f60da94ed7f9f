"""The shape of a model, as every part that needs one sees it.

core/model_files.py makes it of what all families have in common; what only one family knows stays
in `settings` and is read by that family's file in engine/models, whose `configure` makes the final
ModelConfig of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from core.errors import ModelLoadError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` is HF's rope_type: linear, llama3, yarn,
    longrope."""

    kind: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What cos and sin are multiplied by. None: the kind's own default."""
    divisors: tuple[float, ...] = ()
    """longrope: of each frequency. Empty: the checkpoint brings them as a tensor (GGUF)."""

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ModelLoadError(f"the rope scaling factor is {self.factor}; it must be positive")
        if self.kind in ("yarn", "llama3") and self.original_max_position_embeddings < 2:
            raise ModelLoadError(
                f"original_max_position_embeddings is {self.original_max_position_embeddings}; "
                f"{self.kind} scaling needs at least 2"
            )


MAX_SIZE = 2**31 - 1
MAX_REAL = 1e30


class ModelSettings:
    """A model's own settings by Hugging Face's names. Every getter raises ModelLoadError when the
    value is of another kind, or is absent (or null) and there is no default."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, int, default)
        if abs(value) > MAX_SIZE:
            raise ModelLoadError(f"setting {name} is out of range: {value}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.integer(name, default)
        if value < 1:
            raise ModelLoadError(f"setting {name} is {value}; it must be positive")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        found = self._get(name, int if isinstance(value, int) else float, default)
        if not -MAX_REAL <= found <= MAX_REAL:  # nor NaN
            raise ModelLoadError(f"setting {name} is out of range: {value!r}")
        return float(found)

    def optional_real(self, name: str) -> float | None:
        return self.real(name) if name in self else None

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._get(name, bool, default)

    def string(self, name: str, default: str | None = None) -> str:
        return self._get(name, str, default)

    def items(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """A list of one kind; empty when absent."""
        values = self._get(name, list, [])
        if not all(isinstance(value, kind) for value in values):
            raise ModelLoadError(f"setting {name} is not a list of {kind.__name__}")
        return tuple(values)

    def reals(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty when absent."""
        values = self._get(name, list, [])
        if not all(isinstance(value, (int, float)) for value in values):
            raise ModelLoadError(f"setting {name} is not a list of numbers")
        return tuple(map(float, values))

    def nested(self, name: str) -> ModelSettings:
        """Empty when absent."""
        return ModelSettings(self._get(name, dict, {}))

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Hugging Face writes one id, a list of ids, or null; a negative one stands for none."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool) or item > MAX_SIZE:
                raise ModelLoadError(f"setting {name} is no token id: {item!r}")
        return tuple(item for item in ids if item >= 0)

    def _get(self, name: str, kind: type[T], default: T | None) -> T:
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelLoadError(f"setting {name} is missing or no {kind.__name__}: {value!r}")
        return value


MAX_LAYERS = 4096
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a transformer. Sizes in elements, lengths in tokens."""

    architecture: str
    """Hugging Face's model_type, by which engine/models/registry.py picks the class."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int = 0
    """Leading elements of a head that are rotated; 0: all of them."""
    sliding_windows: tuple[int | None, ...] = ()
    """Of each layer: a query sees itself and the window - 1 positions before it. None: all of them.
    Empty: no layer has one."""
    is_causal: bool = True
    """False for an encoder: every token sees the whole sequence, and nothing can be generated."""
    num_labels: int = 0
    """Of a sequence classification head (cross-encoders); 0: there is none."""
    num_token_types: int = 1
    """2: the model tells the texts of a pair apart (BERT)."""
    attention_scale: float | None = None
    """See softmax_scale."""
    attn_logit_softcap: float | None = None
    """Scores are squeezed into (-cap, cap) by cap * tanh(score / cap) before the softmax."""
    final_logit_softcap: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on q, k and v (Qwen2) ..."""
    output_bias: bool = False
    """... and on the attention's output projection (Llama with attention_bias)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm on each head of q and k (Qwen3)."""
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    served_model_len: int | None = None
    """The longest sequence that this worker takes; None: max_model_len. Only a family that computes
    short and long texts differently asks (Phi-3)."""
    is_gguf: bool = False
    """Read from a GGUF file, whose converter stores some tensors otherwise than Hugging Face."""
    fingerprint: str = ""
    """Digest of shape and weights; equal on every machine that holds the same files."""
    settings: ModelSettings = field(default_factory=lambda: ModelSettings({}), compare=False)
    """Everything the files say, for the family's own `configure`."""

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    def __post_init__(self) -> None:
        limits = dict.fromkeys(_SIZES, (1, MAX_SIZE))
        limits |= {"num_layers": (1, MAX_LAYERS), "rotary_dim": (0, self.head_dim)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ModelLoadError(f"{name} is {value}; it must be between {low} and {high}")
        if not all(window is None or 1 <= window <= MAX_SIZE for window in self.sliding_windows):
            raise ModelLoadError(f"sliding windows must be positive: {self.sliding_windows}")
        if self.rope_theta <= 1:
            raise ModelLoadError(f"rope_theta is {self.rope_theta}; it must be above 1")
        if self.num_attention_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_attention_heads} heads cannot share {self.num_kv_heads} kv heads evenly"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(
                f"{len(self.sliding_windows)} attention kinds for {self.num_layers} layers"
            )
