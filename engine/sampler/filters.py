"""top_k, top_p, min_p, typical_p: which tokens of a distribution may be drawn at all.

Filters keep ties: they compare values with a threshold and never depend on a sort order. Each sees
what the one before left, as a distribution of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.sampling_params import SamplingParams

NUM_CANDIDATES = 128
"""Tokens looked at first where the foremost ones must reach a mass; 8 times more if they do not."""


def filter_tokens(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """scaled [num_rows, vocab_size] float64, logits over temperature, each row's largest 0: -inf is
    written over what may not be drawn. One of `params` per row."""
    vocab_size = scaled.shape[-1]
    _leave_out(scaled, [p.top_k if 0 < p.top_k < vocab_size else None for p in params], _top_k)
    _leave_out(scaled, [p.top_p if p.top_p < 1.0 else None for p in params], _top_p)
    _leave_out(scaled, [math.log(p.min_p) if p.min_p > 0.0 else None for p in params], _min_p)
    _leave_out(scaled, [p.typical_p if p.typical_p < 1.0 else None for p in params], _typical_p)


def _leave_out(
    scaled: Tensor,
    limits: Sequence[float | None],
    left_out: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """-inf where `left_out(rows, [num_rows, 1] limits)` is true; rows whose limit is None stay."""
    rows = [row for row, limit in enumerate(limits) if limit is not None]
    if rows:
        part = scaled[rows]
        column = scaled.new_tensor([limits[row] for row in rows]).unsqueeze(-1)
        scaled[rows] = part.masked_fill(left_out(part, column), float("-inf"))


def _top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """What is below the k-th largest."""
    ranks = top_k.long()
    largest = scaled.topk(int(ranks.max())).values
    return scaled < largest.gather(1, ranks - 1)


def _top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    """What is below the smallest number of likeliest tokens that reach p (arXiv:1904.09751)."""
    return scaled < _key_at_mass(scaled, scaled.softmax(dim=-1), top_p)


def _min_p(scaled: Tensor, log_min_p: Tensor) -> Tensor:
    """What is less likely than p times the likeliest (arXiv:2407.01082), which is at 0."""
    return scaled < log_min_p


def _typical_p(scaled: Tensor, typical_p: Tensor) -> Tensor:
    """What is below the smallest number of tokens that reach p, those first whose information is
    nearest to the row's entropy (locally typical sampling, arXiv:2202.00666)."""
    probabilities = scaled.softmax(dim=-1)
    # Not sum(): its order of additions depends on the number of rows.
    entropy: Tensor = torch.special.entr(probabilities).cumsum(dim=-1)[:, -1:]
    nearness = -(scaled.log_softmax(dim=-1) + entropy).abs()
    return nearness < _key_at_mass(nearness, probabilities, typical_p)


def _key_at_mass(
    keys: Tensor, probabilities: Tensor, mass: Tensor, width: int = NUM_CANDIDATES
) -> Tensor:
    """[num_rows, 1]: key of the token with which the tokens of highest key reach `mass` together;
    the lowest key of all if they never do."""
    width = min(width, keys.shape[-1])
    ordered, token_ids = keys.topk(width)
    reached = probabilities.gather(1, token_ids).cumsum(dim=-1)
    rank = (reached < mass).sum(dim=-1, keepdim=True)
    key = ordered.gather(1, rank.clamp(max=width - 1))
    short = (rank == width).squeeze(-1)
    if width < keys.shape[-1] and bool(short.any()):
        key[short] = _key_at_mass(keys[short], probabilities[short], mass[short], 8 * width)
    return key
