"""Runs one step of a model on one rank: batch in, sampled tokens out. In a pipeline a rank has the
layers of its stage; hidden states go from stage to stage, and the last one has the tokens.

Owns the model's parameters and the KV cache's memory. Knows no sequence beyond the step and no
block beyond its id.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import ConfigError
from core.kv import KVLayout
from core.model_config import ModelConfig
from core.model_files import load_model_config
from core.request import TokenLogprobs
from core.worker import Progress
from cpu_kernels.library import choose_library
from cpu_kernels.stage import Stage
from engine.batch import (
    Batch,
    ForwardInputs,
    Pooling,
    ScheduledSequence,
    SequenceResult,
    build_inputs,
)
from engine.fused_stage import fused_stage, stage_inputs
from engine.kernels import AttentionPlan, plan_attention
from engine.kernels.native_attention import native_layout
from engine.kv_cache import KVCache
from engine.models.interface import Model, model_class
from engine.models.moe import Experts
from engine.sampler import prompt_logprobs, sample
from engine.weights.loader import has_own_head, load_weights, open_checkpoint
from parallel.groups import WHOLE, Placement, Rank, SingleRank
from parallel.packed_weight import pack_weights
from parallel.partition import kv_head_range

LOGITS_ROWS = 32
"""Prompt rows whose logits are held at once."""


class Forward(NamedTuple):
    """What a forward pass leaves."""

    hidden: Tensor
    """[num_tokens, hidden_size], not normed yet; in the model's dtype, from a stage float32."""
    logits: Tensor
    """[number of sequences with samples, vocab_size] float32."""
    likeliest: Tensor | None
    """[number of sequences with samples] int64, as `sample` takes it; None: not known yet."""
    finite: Tensor
    """[number of sequences] bool. What is no number spreads to all later tokens of its sequence, so
    the last one tells."""


class ModelRunner:
    """Raises ConfigError (ModelLoadError for the files) at construction; a runner that exists can
    run."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: Rank | None = None,
        progress: Progress | None = None,
    ) -> None:
        rank = rank or Rank(group=SingleRank())
        _check_parallel(config, rank)
        self._rank = rank
        # Process-wide, and torch's default is all cores: several workers on one machine would
        # otherwise fight for them. Set once, before the first operator.
        torch.set_num_threads(config.num_threads)
        self._num_threads = config.num_threads
        read = load_model_config(config.model_path)
        model = model_class(read)
        checkpoint = open_checkpoint(config.model_path)
        tied = read.tie_word_embeddings and not has_own_head(checkpoint)
        self.model_config = model.configure(
            replace(read, served_model_len=config.max_model_len, tie_word_embeddings=tied)
        )
        self.max_model_len = _max_model_len(config, self.model_config)
        self._device = _usable_device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        # Before the weights, which take longest: what cannot work shall be said at once.
        self._library = _kernel_library(config, progress) if self._device.type == "cpu" else None
        layout = _kv_layout(config, self.model_config, rank)
        if self._library is not None:
            layout = native_layout(layout, self.model_config)
        self.kv_cache = KVCache(layout, config.cache, device=self._device)
        placement = Placement(
            group=rank.group,
            stage=rank.stage,
            dtype=self._dtype,
            device=self._device,
            expert_parallel=config.parallel.expert_parallel,
            quantization=config.quantization,
        )
        self._model = model(self.model_config, placement=placement)
        whole = None
        if rank.stage.count > 1 or placement.expert_parallel:
            # So that a rank knows which of the checkpoint's tensors others need, and which nobody.
            nowhere = replace(
                placement, stage=WHOLE, expert_parallel=False, device=torch.device("meta")
            )
            whole = model(self.model_config, placement=nowhere)
        _check_experts(placement, whole)
        load_weights(self._model, self._model.adapt(checkpoint), progress, whole=whole)
        self._stage = self._use_kernels()

    def _use_kernels(self) -> Stage | None:
        """Pack the loaded weights; one call for all layers, where the kernels know the model."""
        if self._library is None:
            return None
        pack_weights(self._model, self._library, num_threads=self._num_threads)
        if self.kv_cache.layout.inner_order == "plain":
            return None
        stage = fused_stage(self._model, self.model_config, self._rank, self._library)
        if stage is not None:
            # What is left for torch is small, and its waiting threads would take the cores from
            # ours for milliseconds.
            torch.set_num_threads(1)
        return stage

    @property
    def weight_bytes(self) -> int:
        """Of parameters and buffers; a tensor under two names (tied embeddings) counts once."""
        tensors = self._model.state_dict().values()
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @torch.inference_mode()
    def execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        """Run the step; one result per sequence of the batch, in order. All ranks of a worker run
        the same one; only the first rank of the last stage has results, the others return none.
        Raises RankLostError."""
        forward = self._forward(batch)
        if forward is None:
            return ()
        results = self._read_hidden(batch, forward)
        if self._rank.group.rank != 0:
            return ()  # it has done its part of the group's logits; tokens are drawn once
        specs = [sequence.samples for sequence in batch.sequences if sequence.samples]
        sampled = iter(sample(forward.logits, specs, forward.likeliest) if specs else ())
        return tuple(
            result._replace(sampled=next(sampled)) if sequence.samples else result
            for sequence, result in zip(batch.sequences, results, strict=True)
        )

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Run the step; [number of sequences with samples, vocab_size] float32. On the ranks of the
        last stage, while those before it execute the same step."""
        forward = self._forward(batch)
        assert forward is not None, "only the last stage has logits"
        return forward.logits

    def _forward(self, batch: Batch) -> Forward | None:
        """None: the next stage goes on."""
        cache = self.kv_cache
        cache.copy_blocks(batch.block_copies)
        block_size = cache.layout.block_size
        if self._stage is not None:
            step = stage_inputs(batch, block_size=block_size)
            out = self._stage.run(step, cache.tensor, num_threads=self._num_threads)
            return Forward(out.hidden, out.logits, out.likeliest, out.finite)
        inputs = build_inputs(batch, block_size=block_size, device=self._device)
        plan = plan_attention(
            inputs,
            cache.layout,
            cache.num_blocks,
            self.model_config,
            self._library,
            dtype=self._dtype,
            num_threads=self._num_threads,
        )
        hidden = self._run_layers(inputs, plan)
        if hidden is None:
            return None
        last_rows = [
            first + n - 1 for first, n in zip(inputs.query_starts, inputs.query_lens, strict=True)
        ]
        finite = hidden[last_rows].isfinite().all(dim=1)
        return Forward(hidden, self._logits(hidden[inputs.sample_rows]), None, finite)

    def _run_layers(self, inputs: ForwardInputs, plan: AttentionPlan) -> Tensor | None:
        """[num_tokens, hidden_size] out of the model's last layer; None: this stage's went on to
        the next one."""
        stage, link = self._rank.stage, self._rank.link
        before = None if link is None or stage.is_first else link.receive(len(inputs.token_ids))
        hidden = self._model(inputs.token_ids, inputs.positions, self.kv_cache.tensor, plan, before)
        if link is None or stage.is_last:
            return hidden
        link.send(hidden)
        return None

    def _logits(self, rows: Tensor) -> Tensor:
        """Not asked of a model for no row: an encoder may have none to give."""
        if len(rows) == 0:
            return rows.new_empty((0, self.model_config.vocab_size), dtype=torch.float32)
        return self._model.compute_logits(rows)

    def _read_hidden(self, batch: Batch, forward: Forward) -> list[SequenceResult]:
        """Everything but the tokens."""
        starts = (0, *accumulate(len(sequence.token_ids) for sequence in batch.sequences))
        return [
            SequenceResult(
                prompt_logprobs=self._prompt_logprobs(sequence, forward.hidden, start),
                is_finite=is_finite,
                pooled=self._pool(sequence, forward.hidden, start, end),
            )
            for sequence, (start, end), is_finite in zip(
                batch.sequences, pairwise(starts), forward.finite.tolist(), strict=True
            )
        ]

    def _prompt_logprobs(
        self, sequence: ScheduledSequence, hidden: Tensor, first: int
    ) -> tuple[TokenLogprobs, ...]:
        """Of the sequence's rows, which begin at `first`, a few at a time: a whole chunk's logits
        would be hundreds of megabytes."""
        if sequence.num_prompt_logprobs is None:
            return ()
        found: list[TokenLogprobs] = []
        next_ids = sequence.next_token_ids
        for start in range(0, len(next_ids), LOGITS_ROWS):
            some = next_ids[start : start + LOGITS_ROWS]
            rows = hidden[first + start : first + start + len(some)]
            logits = self._model.compute_logits(rows.to(self._dtype))
            found += prompt_logprobs(logits, some, sequence.num_prompt_logprobs)
        return tuple(found)

    def _pool(
        self, sequence: ScheduledSequence, hidden: Tensor, start: int, end: int
    ) -> Tensor | None:
        """Of the sequence's rows, [start, end)."""
        if sequence.pooling is None:
            return None
        hidden = hidden.to(self._dtype)
        if sequence.pooling is Pooling.CLASSIFY:
            return self._model.compute_logits(hidden[start : start + 1])[0]
        if sequence.pooling is Pooling.MEAN:
            return self._model.normalize(hidden[start:end]).float().sum(dim=0)
        row = start if sequence.pooling is Pooling.CLS else end - 1
        return self._model.normalize(hidden[row : row + 1])[0].float()


def _check_parallel(config: EngineConfig, rank: Rank) -> None:
    parallel = config.parallel
    if parallel.tensor_parallel_size != rank.group.size:
        raise ConfigError(
            f"tensor_parallel_size is {parallel.tensor_parallel_size}, "
            f"but this rank's group has {rank.group.size} rank(s)"
        )
    if parallel.pipeline_parallel_size != rank.stage.count:
        raise ConfigError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, "
            f"but this rank is in one of {rank.stage.count} stage(s)"
        )
    assert (rank.link is None) == (rank.stage.count == 1), f"{rank.stage} with {rank.link}"


def _check_experts(placement: Placement, whole: Model | None) -> None:
    if not placement.expert_parallel:
        return
    assert whole is not None
    if not any(isinstance(module, Experts) for _, module in whole.named_modules()):
        raise ConfigError("the model has no experts that could be spread over ranks (ep)")


def _kernel_library(config: EngineConfig, progress: Progress | None) -> ctypes.CDLL | None:
    """Raises ConfigError where the configuration insists on what cannot be had."""

    def note(text: str) -> None:
        if progress is not None:
            progress(text, 0.0)

    return choose_library(config.kernels, cache=config.kernel_cache, note=note)


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


def _kv_layout(config: EngineConfig, model_config: ModelConfig, rank: Rank) -> KVLayout:
    kv_heads = kv_head_range(model_config.num_kv_heads, rank.group.rank, rank.group.size)
    layers = rank.stage.layers(model_config.num_layers)
    arithmetic = "-".join(filter(None, (config.dtype, config.quantization)))
    return KVLayout(
        model=f"{model_config.fingerprint}-{arithmetic}",
        dtype=config.dtype if config.cache.dtype == "auto" else config.cache.dtype,
        block_size=config.cache.block_size,
        first_layer=layers.start,
        num_layers=len(layers),
        first_kv_head=kv_heads.start,
        num_kv_heads=len(kv_heads),
        head_dim=model_config.head_dim,
    )
