"""What a model folder or GGUF file says of the model's shape. Read by router and workers alike.

What all families have in common is read here under Hugging Face's names, with transformers' plain
defaults; what only one family knows stays in `settings` and is read by that family's file in
engine/models, whose `configure` makes the final ModelConfig of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from core.errors import ModelLoadError
from core.gguf_file import GGUFFile, read_gguf

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
        return self._get(name, int, default)

    def real(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        return float(self._get(name, int if isinstance(value, int) else float, default))

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
        """Hugging Face writes one id, a list of ids, or null."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [value]
        return tuple(item for item in ids if isinstance(item, int))

    def _get(self, name: str, kind: type[T], default: T | None) -> T:
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelLoadError(f"setting {name} is missing or no {kind.__name__}: {value!r}")
        return value


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
    """What scores are multiplied by; None: head_dim ** -0.5."""
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

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.num_attention_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_attention_heads} heads cannot share {self.num_kv_heads} kv heads evenly"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(
                f"{len(self.sliding_windows)} attention kinds for {self.num_layers} layers"
            )


def load_model_config(model_path: str) -> ModelConfig:
    """Raises ModelLoadError when the path is no GGUF file and no folder with a config.json, or the
    model is one that we would run wrongly."""
    path = Path(model_path)
    if path.is_file():
        return _from_gguf(read_gguf(path))
    if (path / "config.json").is_file():
        return _from_folder(path)
    raise ModelLoadError(f"{model_path}: neither a GGUF file nor a folder with config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return value


def _from_folder(folder: Path) -> ModelConfig:
    config = ModelSettings(_plain(_read_json(folder / "config.json")))
    generation = ModelSettings(_read_json(folder / "generation_config.json"))
    try:
        return _from_hf(config, generation, fingerprint=_fingerprint(folder))
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}/config.json: {error.message}") from error


_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "rms_norm_eps": ("norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "hidden_act": ("hidden_activation", "activation_function"),
}
"""What older families call the same."""


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
    },
    "mistral": {"sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen3": {"head_dim": 128},
    "smollm3": {"tie_word_embeddings": True},
}
"""What transformers assumes where a config.json is silent: published files leave out much of it.
Not here: what is assumed for every family, and what only the family's own file reads."""


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """config.json under the names used here, of the language part when there are others."""
    if isinstance(values.get("text_config"), dict):
        values = {**values, **values["text_config"]}
    plain = {**_DEFAULTS.get(str(values.get("model_type")), {}), **values}
    for name, others in _OTHER_NAMES.items():
        found = [values[other] for other in others if values.get(other) is not None]
        if found and plain.get(name) is None:
            plain[name] = found[0]
    return plain


def _from_hf(config: ModelSettings, generation: ModelSettings, fingerprint: str) -> ModelConfig:
    if "quantization_config" in config:
        raise ModelLoadError("quantization_config: quantised safetensors are not supported")
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // max(num_heads, 1))
    max_model_len = config.integer("max_position_embeddings")
    rope = config.nested("rope_parameters")  # transformers 5 keeps theta and scaling together
    bias = config.flag("attention_bias", False)
    return ModelConfig(
        architecture=config.string("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 4 * hidden_size),
        num_layers=config.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_model_len=max_model_len,
        norm_eps=config.real("rms_norm_eps"),
        rope_theta=config.real("rope_theta", rope.real("rope_theta", 10000.0)),
        rope_scaling=rope_scaling(
            config.nested("rope_scaling") if "rope_scaling" in config else rope, max_model_len
        ),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        hidden_act=config.string("hidden_act", "silu"),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=generation.token_ids("eos_token_id") or config.token_ids("eos_token_id"),
        fingerprint=fingerprint,
        settings=config,
    )


def rope_scaling(scaling: ModelSettings, max_position: int) -> RopeScaling | None:
    """Hugging Face's rope_scaling or rope_parameters; None for plain rotation."""
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return None
    return RopeScaling(
        kind=kind,
        factor=scaling.real("factor", 1.0),
        original_max_position_embeddings=scaling.integer(
            "original_max_position_embeddings", max_position
        ),
        low_freq_factor=scaling.real("low_freq_factor", 1.0),
        high_freq_factor=scaling.real("high_freq_factor", 4.0),
        beta_fast=scaling.real("beta_fast", 32.0),
        beta_slow=scaling.real("beta_slow", 1.0),
        attention_factor=scaling.optional_real("attention_factor"),
    )


_GGUF_ARCHITECTURES: Mapping[str, str] = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
"""GGUF's general.architecture -> Hugging Face's model_type, where they differ."""

_GGUF_SETTINGS: Mapping[str, str] = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""GGUF's key behind the architecture -> Hugging Face's name, of what only some families have."""


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    arch = gguf.string("general.architecture")
    num_heads = gguf.integer(f"{arch}.attention.head_count")
    hidden_size = gguf.integer(f"{arch}.embedding_length")
    head_dim = gguf.integer(f"{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    if "token_embd.weight" not in gguf.tensors:
        raise ModelLoadError(f"{gguf.path.name}: no tensor token_embd.weight (a split file?)")
    bos = gguf.integer("tokenizer.ggml.bos_token_id", -1)
    return ModelConfig(
        architecture=_GGUF_ARCHITECTURES.get(arch, arch),
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=gguf.integer(f"{arch}.feed_forward_length"),
        num_layers=gguf.integer(f"{arch}.block_count"),
        num_attention_heads=num_heads,
        num_kv_heads=gguf.integer(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=gguf.integer(f"{arch}.context_length"),
        norm_eps=gguf.real(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=gguf.real(f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(gguf, arch),
        rotary_dim=gguf.integer(f"{arch}.rope.dimension_count", head_dim),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        output_bias="blk.0.attn_output.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_down.bias" in gguf.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
        bos_token_id=bos if bos >= 0 else None,
        eos_token_ids=gguf_eos_token_ids(gguf),
        fingerprint=_fingerprint(gguf.path),
        is_gguf=True,
        settings=_gguf_settings(gguf, arch),
    )


def _gguf_settings(gguf: GGUFFile, arch: str) -> ModelSettings:
    return ModelSettings(
        {
            ours: gguf.metadata[f"{arch}.{theirs}"]
            for theirs, ours in _GGUF_SETTINGS.items()
            if f"{arch}.{theirs}" in gguf.metadata
        }
    )


def gguf_eos_token_ids(gguf: GGUFFile) -> tuple[int, ...]:
    """The tokens that the file names as ends of text, of turn and of message."""
    ids = [gguf.integer(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id >= 0))


def _gguf_rope_scaling(gguf: GGUFFile, arch: str) -> RopeScaling | None:
    """llama3 scaling is stored as the tensor rope_freqs.weight (factors), not as metadata."""
    kind = gguf.string(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return RopeScaling(
        kind=kind,
        factor=gguf.real(f"{arch}.rope.scaling.factor", 1.0),
        original_max_position_embeddings=gguf.integer(
            f"{arch}.rope.scaling.original_context_length",
            gguf.integer(f"{arch}.context_length"),
        ),
    )


def _fingerprint(path: Path) -> str:
    """Digest of names, sizes and samples of the weight files and the config: cheap, and it changes
    when another fine-tune of the same shape is put in place."""
    files = (
        [path] if path.is_file() else [*sorted(path.glob("*.safetensors")), path / "config.json"]
    )
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode() if path.is_dir() else str(size).encode())
        with file.open("rb") as stream:
            for i in range(17):  # head, tail and 15 places between
                stream.seek(max(0, size - 65536) * i // 16)
                digest.update(stream.read(65536))
    return digest.hexdigest()
