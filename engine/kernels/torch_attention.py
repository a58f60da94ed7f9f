"""Attention over paged KV, in torch: write the new keys and values, attend to all of a sequence's
blocks.

What is equal for all layers of a step (index tensors, masks, grouping) is made once, by
`plan_torch`. Sequences with one query are attended to in batches padded to a common length; longer
chunks one by one. A sequence's padding is its own last block, never another's, so that
nobody's values can reach a neighbour (zero times NaN is NaN).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kv import KVLayout
from core.model_config import ModelConfig
from engine.batch import ForwardInputs
from engine.kernels.reference import decode_attention, gather_kv, prefill_attention, store_kv

Window = int | None
"""A query sees itself and the window - 1 positions before it; None: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Sequences of similar length with one query each."""

    rows: Tensor
    """[B] int64: rows of the flat batch."""
    gather: Tensor
    """See reference.gather_kv."""
    masks: Mapping[Window, Tensor]
    """[B, 1, 1, L] each: 0 or -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Rows [start, end) of the flat batch: the last queries of one sequence of `seq_len` tokens."""

    start: int
    end: int
    seq_len: int
    gather: Tensor | None
    """None: nothing is in the cache before this chunk, its own keys are all there is."""
    masks: Mapping[Window, Tensor | None]
    """[end - start, seq_len] each: 0 or -inf. None is plain causal (or, for an encoder, open)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAttentionPlan:
    """For a cache in plain order."""

    scale: float
    softcap: float | None
    causal: bool
    store_rows: Tensor
    """See reference.store_kv."""
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, window: Window
    ) -> Tensor:
        """`window` is one of those the plan was made for."""
        key, value = store_kv(key, value, kv_layer, self.store_rows)
        out = torch.empty_like(query)
        for group in self.decode:
            keys, values = gather_kv(kv_layer, group.gather, len(group.rows), query.dtype)
            out[group.rows] = decode_attention(
                query[group.rows], keys, values, group.masks[window], self.scale, self.softcap
            )
        for chunk in self.prefill:
            rows = slice(chunk.start, chunk.end)
            keys, values = _chunk_kv(key[rows], value[rows], kv_layer, chunk)
            out[rows] = prefill_attention(
                query[rows],
                keys,
                values,
                chunk.masks[window],
                self.scale,
                self.softcap,
                causal=self.causal,
            )
        return out


def _chunk_kv(
    key: Tensor, value: Tensor, kv_layer: Tensor, chunk: PrefillChunk
) -> tuple[Tensor, Tensor]:
    """[K, seq_len, D] each."""
    if chunk.gather is None:
        return key.transpose(0, 1), value.transpose(0, 1)
    keys, values = gather_kv(kv_layer, chunk.gather, 1, key.dtype)
    return keys[0, :, : chunk.seq_len], values[0, :, : chunk.seq_len]


def plan_torch(
    inputs: ForwardInputs,
    layout: KVLayout,
    num_blocks: int,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
) -> TorchAttentionPlan:
    planner = _Planner(inputs, num_blocks, layout.num_kv_heads, layout.block_size, config, dtype)
    return TorchAttentionPlan(
        scale=config.softmax_scale,
        softcap=config.attn_logit_softcap,
        causal=config.is_causal,
        store_rows=planner.store_rows(),
        decode=tuple(planner.decode_group(indices) for indices in _similar_lengths(inputs)),
        prefill=tuple(
            planner.prefill_chunk(index, start)
            for index, start in enumerate(inputs.query_starts)
            if inputs.query_lens[index] > 1
        ),
    )


def _similar_lengths(inputs: ForwardInputs) -> list[list[int]]:
    """Indices of the sequences with one query, grouped by the power of two of their block count:
    padding at most doubles the work, however uneven the lengths are."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, (query_len, count) in enumerate(
        zip(inputs.query_lens, inputs.num_blocks, strict=True)
    ):
        if query_len == 1:
            groups[max(count - 1, 7).bit_length()].append(index)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class _Planner:
    inputs: ForwardInputs
    num_blocks: int
    num_kv_heads: int
    block_size: int
    config: ModelConfig
    dtype: torch.dtype

    @property
    def _windows(self) -> set[Window]:
        return set(self.config.sliding_windows) or {None}

    @property
    def _device(self) -> torch.device:
        return self.inputs.block_tables.device

    def _range(self, end: int) -> Tensor:
        return torch.arange(end, device=self._device)

    def store_rows(self) -> Tensor:
        slots = self.inputs.slot_mapping
        block, offset = slots // self.block_size, slots % self.block_size
        slices = self._slices(block.unsqueeze(0))[:, 0]  # [2, K, T]
        return (slices * self.block_size + offset).transpose(1, 2).reshape(-1)

    def _slices(self, blocks: Tensor) -> Tensor:
        """[B, n] block ids -> [2, B, K, n] numbers of their head slices in the flattened layer."""
        kv = self._range(2).view(2, 1, 1, 1) * self.num_blocks
        heads = self._range(self.num_kv_heads).view(1, 1, -1, 1)
        return (kv + blocks[None, :, None, :]) * self.num_kv_heads + heads

    def decode_group(self, indices: list[int]) -> DecodeGroup:
        inputs = self.inputs
        num_blocks = max(inputs.num_blocks[index] for index in indices)
        tables = inputs.block_tables[indices, :num_blocks]
        seq_lens = torch.tensor([inputs.seq_lens[i] for i in indices], device=self._device)
        queries = (seq_lens - 1).view(-1, 1, 1, 1)
        return DecodeGroup(
            rows=torch.tensor([inputs.query_starts[i] for i in indices], device=self._device),
            gather=self._slices(tables).reshape(-1),
            masks={
                window: self._mask(queries, self._range(num_blocks * self.block_size), window)
                for window in self._windows
            },
        )

    def prefill_chunk(self, index: int, start: int) -> PrefillChunk:
        query_len, seq_len = self.inputs.query_lens[index], self.inputs.seq_lens[index]
        whole = query_len == seq_len
        assert whole or self.config.is_causal, "an encoder's sequence comes in one chunk"
        positions = self._range(seq_len)
        queries = positions[-query_len:].unsqueeze(1)
        table = self.inputs.block_tables[index : index + 1, : self.inputs.num_blocks[index]]
        return PrefillChunk(
            start=start,
            end=start + query_len,
            seq_len=seq_len,
            gather=None if whole else self._slices(table).reshape(-1),
            masks={
                window: self._mask(queries, positions, window)
                if self._needs_mask(whole, seq_len, window)
                else None
                for window in self._windows
            },
        )

    def _needs_mask(self, whole: bool, seq_len: int, window: Window) -> bool:
        windowed = window is not None and window < seq_len
        capped = self.config.attn_logit_softcap is not None
        return self.config.is_causal and (not whole or windowed or capped)

    def _mask(self, queries: Tensor, keys: Tensor, window: Window) -> Tensor:
        """0 where the query at a position may see the key at a position, else -inf."""
        hidden = keys > queries
        if window is not None:
            hidden = hidden | (keys <= queries - window)
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self._device).masked_fill_(
            hidden, float("-inf")
        )
