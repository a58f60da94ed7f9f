"""The optional second seam of the engine: all layers of a model in one call, where the CPU kernels
know its shape. Without it the same weights run operator by operator; tests hold the two equal.

Owns the question which models have that shape, and what a batch is to such a call. No family knows
of it.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from core.model_config import ModelConfig
from cpu_kernels.attention import can_attend
from cpu_kernels.matmul import PANEL_ROWS, Matrix
from cpu_kernels.stage import Stage, StageInputs, StageLayer, StageModel
from engine.batch import Batch, block_table
from engine.kernels import silu_and_mul
from engine.models.decoder import CausalLM
from engine.models.layers import Attention, GatedMLP, RMSNorm
from engine.models.llama import LlamaDecoderLayer
from engine.models.rotary import RotaryEmbedding
from parallel.groups import Rank
from parallel.packed_weight import PackedWeight
from parallel.weight_formats import Weight


def fused_stage(
    model: object, config: ModelConfig, rank: Rank, library: ctypes.CDLL
) -> Stage | None:
    """None where the model is not built of what the kernels know, or spread over ranks: theirs is
    the whole model, tokens in, logits out, and a stage of a pipeline runs operator by operator.
    Its weights are packed already."""
    if rank.group.size > 1 or rank.stage.count > 1:
        return None
    if not isinstance(model, CausalLM) or not _has_shape(model, config):
        return None
    decoder = model.model
    rotates = [rotation is not None for rotation in model.rotations(torch.zeros(1))]
    rotary: RotaryEmbedding = decoder.rotary
    stage = StageModel(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.norm_eps,
        attention_scale=config.softmax_scale,
        attention_softcap=config.attn_logit_softcap,
        rotation_factor=rotary.attention_factor,
        inverse_frequencies=rotary.inv_freq,
        layers=[
            _stage_layer(layer, rotates=rotated)
            for layer, rotated in zip(decoder.layers.values(), rotates, strict=True)
        ],
        embedding=_matrix(decoder.embed_tokens.weight),
        head=_matrix(model.lm_head.weight),
        final_norm=_norm(decoder.norm),
    )
    return Stage(stage, library)


def stage_inputs(batch: Batch, *, block_size: int) -> StageInputs:
    """The step that `batch` asks for. Needs at least one sequence."""
    sequences = batch.sequences
    tables = [block_table(sequence, block_size) for sequence in sequences]
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    lens = [len(sequence.token_ids) for sequence in sequences]
    computed = [sequence.num_computed_tokens for sequence in sequences]
    logits_rows = [
        end - 1
        for end, sequence in zip(accumulate(lens), sequences, strict=True)
        if sequence.samples
    ]
    numbers = np.array(lens + computed + logits_rows, np.int32)  # one is sooner made than three
    query_lens, num_computed, rows = np.split(numbers, (len(lens), 2 * len(lens)))
    return StageInputs(
        token_ids=np.array([t for sequence in sequences for t in sequence.token_ids], np.int64),
        query_lens=query_lens,
        num_computed=num_computed,
        block_tables=block_tables,
        logits_rows=rows,
    )


_PLAIN_METHODS = ("embed", "forward", "normalize", "compute_logits")
"""What a family may override; then it computes something the kernels do not know."""


def _has_shape(model: CausalLM, config: ModelConfig) -> bool:
    family = type(model)
    return (
        all(getattr(family, name) is getattr(CausalLM, name) for name in _PLAIN_METHODS)
        and type(model.model.norm) is RMSNorm
        and model.final_logit_softcap is None
        and can_attend(config.head_dim)
        and config.intermediate_size % PANEL_ROWS == 0
        and all(_is_known(layer) for layer in model.model.layers.values())
        and all(isinstance(m, PackedWeight) for m in model.modules() if isinstance(m, Weight))
    )


def _is_known(layer: nn.Module) -> bool:
    return (
        type(layer) is LlamaDecoderLayer
        and type(layer.self_attn) is Attention
        and type(layer.mlp) is GatedMLP
        and layer.mlp.act_and_mul is silu_and_mul
        and all(
            type(norm) in (RMSNorm, type(None))
            for norm in (
                layer.input_layernorm,
                layer.post_attention_layernorm,
                layer.self_attn.q_norm,
                layer.self_attn.k_norm,
            )
        )
    )


def _stage_layer(layer: nn.Module, *, rotates: bool) -> StageLayer:
    assert isinstance(layer, LlamaDecoderLayer)
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, GatedMLP)
    return StageLayer(
        qkv=_matrix(attention.qkv_proj.weight),
        output=_matrix(attention.o_proj.weight),
        gate_up=_matrix(mlp.gate_up_proj.weight),
        down=_matrix(mlp.down_proj.weight),
        qkv_bias=_vector(attention.qkv_proj.bias),
        output_bias=_vector(attention.o_proj.bias),
        gate_up_bias=_vector(mlp.gate_up_proj.bias),
        down_bias=_vector(mlp.down_proj.bias),
        input_norm=_norm(layer.input_layernorm),
        post_attention_norm=_norm(layer.post_attention_layernorm),
        query_norm=None if attention.q_norm is None else _norm(attention.q_norm),
        key_norm=None if attention.k_norm is None else _norm(attention.k_norm),
        window=attention.sliding_window,
        rotates=rotates,
    )


def _matrix(weight: Weight) -> Matrix:
    assert isinstance(weight, PackedWeight)
    return weight.matrix


def _norm(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight.float()


def _vector(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float()
