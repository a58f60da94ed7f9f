"""Runs one step of a model on one rank: batch in, sampled tokens out.

Owns the model's parameters and the KV cache's memory. Knows no sequence beyond the step and no
block beyond its id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import ConfigError
from core.kv import KVLayout
from core.model_config import ModelConfig, load_model_config
from core.worker import Progress
from engine.batch import Batch, build_inputs
from engine.kernels import plan_attention
from engine.kv_cache import KVCache
from engine.models.registry import build_model
from engine.sampler import NO_TOKEN, sample
from engine.weights.loader import load_weights, open_checkpoint
from parallel.groups import Group, Placement, SingleRank
from parallel.partition import kv_head_range


class ModelRunner:
    """Raises ConfigError (ModelLoadError for the files) at construction; a runner that exists can
    run."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        group: Group | None = None,
        progress: Progress | None = None,
    ) -> None:
        group = group or SingleRank()
        _check_parallel(config, group)
        # Process-wide, and torch's default is all cores: several workers on one machine would
        # otherwise fight for them. Set once, before the first operator.
        torch.set_num_threads(config.num_threads)
        self.model_config = load_model_config(config.model_path)
        self.max_model_len = _max_model_len(config, self.model_config)
        self._device = _usable_device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        # Before the weights, which take longest: what cannot work shall be said at once.
        layout = _kv_layout(config, self.model_config, group)
        self.kv_cache = KVCache(layout, config.cache, device=self._device)
        placement = Placement(group=group, dtype=self._dtype, device=self._device)
        self._model = build_model(self.model_config, placement=placement)
        load_weights(self._model, open_checkpoint(config.model_path), progress)

    def execute(self, batch: Batch) -> tuple[int | None, ...]:
        """Run the step; one token per sequence whose `sample` is not None, in order. None where
        the model gave no number to choose by: that sequence alone has failed."""
        specs = [s.sample for s in batch.sequences if s.sample is not None]
        logits = self.logits(batch)
        with torch.inference_mode():
            token_ids = sample(logits, specs).tolist()
        return tuple(None if token_id == NO_TOKEN else token_id for token_id in token_ids)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Run the step; [num_samples, vocab_size] float32, before temperature."""
        config, cache = self.model_config, self.kv_cache.tensor
        if not batch.sequences:
            return torch.empty((0, config.vocab_size), device=self._device)
        block_size = self.kv_cache.layout.block_size
        inputs = build_inputs(batch, block_size=block_size, device=self._device)
        plan = plan_attention(
            inputs,
            cache.shape,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_window,
            dtype=self._dtype,
        )
        hidden = self._model(inputs.token_ids, inputs.positions, cache, plan)
        return self._model.compute_logits(hidden[inputs.sample_rows])


def _check_parallel(config: EngineConfig, group: Group) -> None:
    if config.parallel.pipeline_parallel_size != 1:
        raise ConfigError("pipeline_parallel_size above 1 is not supported yet")
    if config.parallel.tensor_parallel_size != group.size:
        raise ConfigError(
            f"tensor_parallel_size is {config.parallel.tensor_parallel_size}, "
            f"but this rank's group has {group.size} rank(s)"
        )


def _usable_device(name: str) -> torch.device:
    """Raises ConfigError when torch cannot use it here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {name} cannot be used here: {reason}") from error
    return device


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.max_model_len is None:
        return model_config.max_model_len
    if not 1 <= config.max_model_len <= model_config.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; "
            f"the model allows 1 to {model_config.max_model_len}"
        )
    return config.max_model_len


def _kv_layout(config: EngineConfig, model_config: ModelConfig, group: Group) -> KVLayout:
    kv_heads = kv_head_range(model_config.num_kv_heads, group.rank, group.size)
    return KVLayout(
        model=model_config.fingerprint,
        dtype=config.dtype,
        block_size=config.cache.block_size,
        first_layer=0,
        num_layers=model_config.num_layers,
        num_kv_heads=len(kv_heads),
        head_dim=model_config.head_dim,
    )
