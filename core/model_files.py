"""What a model folder or GGUF file says of the model's shape. Read by router and workers alike.

Both are read under Hugging Face's names, with transformers' defaults. No tensor is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from core.gguf_file import GGUFFile, read_gguf
from core.model_config import ModelConfig, ModelSettings, RopeScaling


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
    except (OSError, ValueError, RecursionError) as error:
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
    "granite": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {"sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen3": {"head_dim": 128},
    "smollm3": {"tie_word_embeddings": True},
}
"""What transformers assumes where a config.json is silent: published files leave out much of it.
Here and not in the family's own file, because null and absent must differ: a window that is null is
none, one that is absent is 4096. `ModelSettings` no longer tells them apart. What is assumed for
every family is in `_from_hf`."""


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
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
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
        try:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode() if path.is_dir() else str(size).encode())
            with file.open("rb") as stream:
                for i in range(17):  # head, tail and 15 places between
                    stream.seek(max(0, size - 65536) * i // 16)
                    digest.update(stream.read(65536))
        except OSError as error:
            raise ModelLoadError(f"{file}: not readable ({error.strerror})") from error
    return digest.hexdigest()
