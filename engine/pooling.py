"""Vectors and scores instead of tokens: the ask, how a model wants its vectors pooled, the answer.

A pooled sequence goes through the same scheduler, batch and runner as any prompt. Text and its
special tokens are the tokenizer's business: sequences come here as the model was trained on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from core.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from core.model_config import ModelConfig, ModelSettings
from core.prefix import BlockHash
from core.request import GenerateRequest
from core.sampling_params import SamplingParams, check_token_ids
from engine.batch import Pooling
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """One vector (or one row of label scores, for Pooling.CLASSIFY) of one sequence."""

    request_id: str
    token_ids: tuple[int, ...]
    pooling: Pooling
    second_token_ids: tuple[int, ...] = ()
    """The second text of a pair that a cross-encoder reads as one sequence, with the special tokens
    that follow it."""
    cache_salt: str = ""
    priority: int = 0

    def check(self, model_config: ModelConfig, max_model_len: int) -> None:
        """Raises InvalidRequestError, ContextLengthError for what must not get into a step."""
        token_ids = self.token_ids + self.second_token_ids
        if not token_ids:
            raise InvalidRequestError("the input is empty", param="input")
        check_token_ids(token_ids, model_config.vocab_size, "input")
        if len(token_ids) > max_model_len:
            raise ContextLengthError(
                f"{len(token_ids)} tokens do not fit into a context of {max_model_len}",
                param="input",
            )
        if self.pooling is Pooling.CLASSIFY and not model_config.num_labels:
            raise InvalidRequestError(
                f"this {model_config.architecture} model has no classification head", param="model"
            )

    def sequence(self, root: BlockHash, model_config: ModelConfig, *, now: float) -> Sequence:
        """What the scheduler runs; `root` as for any sequence."""
        is_typed = model_config.num_token_types > 1
        shift = model_config.vocab_size if is_typed else 0  # see engine/models/bert.py
        request = GenerateRequest(
            request_id=self.request_id,
            model="",
            prompt_token_ids=(*self.token_ids, *(shift + i for i in self.second_token_ids)),
            sampling=SamplingParams(max_tokens=1),
            cache_salt=self.cache_salt,
            priority=self.priority,
        )
        return Sequence(
            request, root, now=now, pooling=self.pooling, needs_whole=not model_config.is_causal
        )


def pooled_vector(sequence: Sequence) -> Tensor:
    """Of a pooled sequence that was computed to its end: [hidden_size] (CLASSIFY: [num_labels])
    float32."""
    assert sequence.pooled is not None, f"{sequence.key} has not been computed"
    if sequence.pooling is Pooling.MEAN:
        return sequence.pooled / len(sequence.token_ids)
    return sequence.pooled


def check_can_generate(model_config: ModelConfig) -> None:
    """Raises InvalidRequestError for an encoder."""
    if not model_config.is_causal:
        raise InvalidRequestError(
            f"{model_config.architecture} is an encoder: it embeds and scores text, "
            "it cannot generate any",
            param="model",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How a model's vectors are meant to be made."""

    pooling: Pooling
    normalize: bool
    """To length 1."""


def load_pooling_config(model_path: str, model_config: ModelConfig) -> PoolingConfig:
    """What sentence-transformers has written beside the model; else the mean over an encoder's
    tokens or the last of a decoder's, normalised. Raises ModelLoadError for a step after the model
    that we do not have: without it the vectors would be wrong."""
    path = Path(model_path) / "modules.json"
    if not path.is_file():
        pooling = Pooling.LAST if model_config.is_causal else Pooling.MEAN
        return PoolingConfig(pooling=pooling, normalize=True)
    modules = {_kind(module): module.string("path", "") for module in _read(path)}
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise ModelLoadError(f"{path}: {', '.join(sorted(unknown))} is not supported")
    if "Pooling" not in modules:
        raise ModelLoadError(f"{path}: no Pooling")
    return PoolingConfig(
        pooling=_read_pooling(path.parent / modules["Pooling"] / "config.json"),
        normalize="Normalize" in modules,
    )


def _kind(module: ModelSettings) -> str:
    """Its class, without the package it was in when the model was saved."""
    return module.string("type").rpartition(".")[2]


_POOLINGS: Mapping[str, Pooling] = {
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
    "cls": Pooling.CLS,
    "cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST,
}


def _read_pooling(path: Path) -> Pooling:
    """One name, or in files of older versions one flag per kind."""
    (settings,) = _read(path)
    flags = [name for name in settings if name.startswith("pooling_mode_") and settings.flag(name)]
    plain = " and ".join(name.removeprefix("pooling_mode_") for name in flags)
    mode = settings.string("pooling_mode", plain)
    if mode not in _POOLINGS:
        raise ModelLoadError(
            f"{path}: pooling {mode!r} is not supported; supported: {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[mode]


def _read(path: Path) -> list[ModelSettings]:
    """The objects of a JSON file that holds one, or a list of them."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable JSON ({error})") from error
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, dict) for item in values):
        raise ModelLoadError(f"{path}: not a JSON object or a list of them")
    return [ModelSettings(item) for item in values]
