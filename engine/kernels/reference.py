"""Every kernel in plain torch: the definition that faster ones are tested against.

Shapes: T tokens, B sequences, H query heads, K kv heads, D head_dim, L positions. One layer of the
KV cache is [2, num_blocks, K, block_size, R], keys first; R is D, or more where rows end with a
scale (cpu_kernels/kv_dtype.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_kernels.kv_dtype import kv_dtype_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dim, which has weight's size (arXiv:1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Over the last dim, which has weight's size (arXiv:1607.06450)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R elements of each head of x [T, heads, D]; cos and sin [T, 1, R], sin with
    its first half negated, so that the rotation of the pairs (i, i + R/2) is one roll and one fused
    multiply-add (arXiv:2104.09864)."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rope(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(size // 2, dims=-1), sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * size] -> [T, size]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * size] -> [T, size]: gelu(gate) * up, with the tanh form of gelu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap): nearly x where small, never beyond the cap (arXiv:2408.00118)."""
    return x if cap is None else torch.tanh(x / cap) * cap


def store_kv(key: Tensor, value: Tensor, kv_layer: Tensor, rows: Tensor) -> Tensor:
    """Write key and value [T, K, D] into the cache; `rows` [2 * T * K] counts rows of the flattened
    layer, in the order (key or value, token, head). Returns both, [2, T, K, D], as they will be
    read back: what attends to them now must see what a later step will."""
    kv_dtype = kv_dtype_of(kv_layer)
    stored = kv_dtype.encode(torch.stack((key, value)))
    kv_layer.view(-1, stored.shape[-1]).index_copy_(0, rows, stored.flatten(0, 2))
    return kv_dtype.decode(stored, key.dtype)


def gather_kv(kv_layer: Tensor, index: Tensor, num_sequences: int, dtype: torch.dtype) -> Tensor:
    """[2, B, K, L, D] of the blocks in `index`, which counts head slices of the flattened layer in
    the order (key or value, sequence, head, block). One index_select for keys and values."""
    _, _, num_kv_heads, block_size, row_size = kv_layer.shape
    slices = kv_layer.view(-1, block_size * row_size).index_select(0, index)
    stored = slices.view(2, num_sequences, num_kv_heads, -1, row_size)
    return kv_dtype_of(kv_layer).decode(stored, dtype)


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float | None
) -> Tensor:
    """One query per sequence: query [B, H, D], keys and values [B, K, L, D], additive mask
    [B, 1, 1, L] -> [B, H, D].

    The heads of a group are the rows of one product with their common keys. Softmax in float32, as
    a bfloat16 sum over thousands of positions would lose them. (Batched products took a third of
    the time of scaled_dot_product_attention with one query in bfloat16, 4/5 of it in float32.)
    """
    batch, num_kv_heads, _, head_dim = keys.shape
    grouped = (query * scale).view(batch, num_kv_heads, -1, head_dim)
    scores = softcap(torch.matmul(grouped, keys.transpose(-1, -2)), cap) + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).view(query.shape)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    *,
    causal: bool,
) -> Tensor:
    """One sequence: query [T, H, D], keys and values [K, L, D] -> [T, H, D]. `mask` [T, L] is added
    to the scores; None is plain causal, which needs T == L, or, if not causal, everything."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    grouped = query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = keys.unsqueeze(1), values.unsqueeze(1)
    if cap is None:
        out = F.scaled_dot_product_attention(
            grouped,
            keys.expand(-1, group, -1, -1),  # a view: no copy per query head
            values.expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None and causal,
            scale=scale,
        )
    else:  # what scaled_dot_product_attention cannot do
        assert mask is not None, "a capped score is masked after the cap"
        scores = softcap(torch.matmul(grouped * scale, keys.transpose(-1, -2)), cap) + mask
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        out = torch.matmul(weights, values)
    return out.permute(2, 0, 1, 3).reshape(query.shape)
