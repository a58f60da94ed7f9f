"""Every kernel in plain torch: the definition that faster ones are tested against.

Shapes: T tokens, B sequences, H query heads, K kv heads, D head_dim, L positions. One layer of the
KV cache is [2, num_blocks, K, block_size, D], keys first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dim, which has weight's size (arXiv:1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D]; cos and sin [T, 1, D], sin with its first half negated, so that the
    rotation of the pairs (i, i + D/2) is one roll and one fused multiply-add (arXiv:2104.09864)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * size] -> [T, size]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(key: Tensor, value: Tensor, kv_layer: Tensor, rows: Tensor) -> None:
    """Write key and value [T, K, D] into the cache; `rows` [2 * T * K] counts rows of D elements
    of the flattened layer, in the order (key or value, token, head)."""
    head_dim = kv_layer.shape[-1]
    kv_layer.view(-1, head_dim).index_copy_(0, rows, torch.stack((key, value)).view(-1, head_dim))


def gather_kv(kv_layer: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """[2, B, K, L, D] of the blocks in `index`, which counts head slices of the flattened layer in
    the order (key or value, sequence, head, block). One index_select for keys and values."""
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    slices = kv_layer.view(-1, block_size * head_dim).index_select(0, index)
    return slices.view(2, num_sequences, num_kv_heads, -1, head_dim)


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """One query per sequence: query [B, H, D], keys and values [B, K, L, D], additive mask
    [B, 1, 1, L] -> [B, H, D].

    The heads of a group are the rows of one product with their common keys. Softmax in float32, as
    a bfloat16 sum over thousands of positions would lose them. (Batched products took a third of
    the time of scaled_dot_product_attention with one query in bfloat16, 4/5 of it in float32.)
    """
    batch, num_kv_heads, _, head_dim = keys.shape
    grouped = (query * scale).view(batch, num_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)) + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).view(query.shape)


def prefill_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """One sequence: query [T, H, D], keys and values [K, L, D] -> [T, H, D]. `mask` [T, L] is added
    to the scores; None is plain causal and needs T == L."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    grouped = query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        grouped,
        keys.unsqueeze(1).expand(-1, group, -1, -1),  # a view: no copy per query head
        values.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(query.shape)
