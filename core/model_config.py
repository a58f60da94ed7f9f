"""What a model folder or GGUF file says of the model's shape. Read by router and workers alike.

One flat value serves all decoder families: a family differs by flags, and the engine's registry
(engine/models/registry.py) picks the class by `architecture`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from core.gguf_file import GGUFFile, read_gguf

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""What engine/models/registry.py has classes for: refused here, before anything is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` is HF's rope_type: linear, llama3, yarn."""

    kind: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


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
    """Shape of a decoder-only transformer. Sizes in elements, lengths in tokens."""

    architecture: str
    """llama, mistral, qwen2 or qwen3: HF's model_type, GGUF's general.architecture."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
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
    fingerprint: str = ""
    """Digest of shape and weights; equal on every machine that holds the same files."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.num_attention_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_attention_heads} heads cannot share {self.num_kv_heads} kv heads evenly"
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


def _ids(value: object) -> tuple[int, ...]:
    """HF writes one id, a list of ids, or null."""
    if isinstance(value, int):
        return (value,)
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, list) else ()


def _from_folder(folder: Path) -> ModelConfig:
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    try:
        return _from_hf(config, generation, fingerprint=_fingerprint(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder}/config.json: bad or missing {error}") from error


def _from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any], fingerprint: str
) -> ModelConfig:
    architecture = _architecture(str(config["model_type"]))
    _refuse_hf_extras(config)
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    rope = config.get("rope_parameters") or {}  # transformers 5 keeps theta and scaling together
    scaling = config.get("rope_scaling") or rope
    bias = bool(config.get("attention_bias", architecture == "qwen2"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_attention_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or _hf_head_dim(architecture, hidden_size, num_heads)),
        max_model_len=int(config["max_position_embeddings"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=_hf_rope_scaling(scaling, int(config["max_position_embeddings"])),
        sliding_window=_hf_sliding_window(architecture, config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and architecture != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        hidden_act=str(config.get("hidden_act", "silu")),
        bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id")),
        fingerprint=fingerprint,
    )


def _architecture(name: str) -> str:
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _refuse_hf_extras(config: Mapping[str, Any]) -> None:
    """Settings that change the computation and that we do not implement."""
    if config.get("quantization_config"):
        raise ModelLoadError("quantization_config: quantised safetensors are not supported")
    rope = config.get("rope_parameters") or {}
    rotary = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    if float(rotary) != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {rotary} is not supported, only 1")


def _hf_head_dim(architecture: str, hidden_size: int, num_heads: int) -> int:
    """What transformers takes when config.json does not say."""
    return 128 if architecture == "qwen3" else hidden_size // max(num_heads, 1)


def _hf_sliding_window(architecture: str, config: Mapping[str, Any]) -> int | None:
    """None when no layer has one. A model whose layers differ is refused."""
    if architecture == "llama":
        return None
    if architecture == "mistral":
        window = config.get("sliding_window", 4096)  # transformers' default; null means none
        return None if window is None else int(window)
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return None
    num_layers = int(config["num_hidden_layers"])
    num_full = min(int(config.get("max_window_layers", 28)), num_layers)
    kinds = config.get("layer_types") or (
        ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    )
    if len(set(kinds)) > 1:
        raise ModelLoadError("sliding-window and full-attention layers in one model: not supported")
    return int(config["sliding_window"]) if kinds[0] == "sliding_attention" else None


def _hf_rope_scaling(scaling: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return None
    factor = scaling.get("attention_factor")
    return RopeScaling(
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        original_max_position_embeddings=int(
            scaling.get("original_max_position_embeddings") or max_position
        ),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast", 32.0)),
        beta_slow=float(scaling.get("beta_slow", 1.0)),
        attention_factor=None if factor is None else float(factor),
    )


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    arch = _architecture(gguf.string("general.architecture"))
    num_heads = gguf.integer(f"{arch}.attention.head_count")
    hidden_size = gguf.integer(f"{arch}.embedding_length")
    head_dim = gguf.integer(f"{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    window = gguf.integer(f"{arch}.attention.sliding_window", 0)
    if gguf.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"{gguf.path.name}: rotation of a part of each head is not supported")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelLoadError(f"{gguf.path.name}: no tensor token_embd.weight (a split file?)")
    bos = gguf.integer("tokenizer.ggml.bos_token_id", -1)
    return ModelConfig(
        architecture=arch,
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=gguf.integer(f"{arch}.feed_forward_length"),
        num_layers=gguf.integer(f"{arch}.block_count"),
        num_attention_heads=num_heads,
        num_kv_heads=gguf.integer(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=gguf.integer(f"{arch}.context_length"),
        rms_norm_eps=gguf.real(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=gguf.real(f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(gguf, arch),
        sliding_window=window or None,
        tie_word_embeddings="output.weight" not in gguf.tensors,
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        output_bias="blk.0.attn_output.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_down.bias" in gguf.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
        bos_token_id=bos if bos >= 0 else None,
        eos_token_ids=gguf_eos_token_ids(gguf),
        fingerprint=_fingerprint(gguf.path),
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
