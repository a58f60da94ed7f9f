"""Which class runs which architecture. A new family is one line here and one file beside."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import ModelLoadError

MODELS: Mapping[str, str] = {
    "llama": "llama:LlamaForCausalLM",
    "mistral": "llama:MistralForCausalLM",
    "qwen2": "llama:Qwen2ForCausalLM",
    "qwen3": "llama:Qwen3ForCausalLM",
    "smollm3": "smollm3:SmolLM3ForCausalLM",
    "gemma2": "gemma:Gemma2ForCausalLM",
    "gemma3_text": "gemma:Gemma3ForCausalLM",
    "phi3": "phi3:Phi3ForCausalLM",
    "qwen2_moe": "qwen2_moe:Qwen2MoeForCausalLM",
    "qwen3_moe": "qwen3_moe:Qwen3MoeForCausalLM",
    "mixtral": "mixtral:MixtralForCausalLM",
    "olmo2": "olmo2:Olmo2ForCausalLM",
    "granite": "granite:GraniteForCausalLM",
    "gpt2": "gpt2:GPT2LMHeadModel",
    "bert": "bert:BertModel",
    "roberta": "bert:RobertaModel",
    "xlm-roberta": "bert:RobertaModel",
}
"""Hugging Face's model_type -> module of this package and class. By name, since the command line
asks what is supported without torch, and a worker needs one family of all."""


def check_architecture(architecture: str) -> None:
    """Raises ModelLoadError naming what there is."""
    if architecture not in MODELS:
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
