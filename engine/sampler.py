"""From logits to token ids: a pure function of each row's logits and its SampleSpec.

No generator object: the one random number of a row comes from a hash of (seed, choice index,
position), so the same request draws the same numbers on any worker, in any batch, after any
recovery. Filters keep ties: they compare values with a threshold and never depend on a sort order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from engine.batch import SampleSpec

NO_TOKEN = -1
NUM_CANDIDATES = 1024
"""Tokens looked at first for top_p; only a flatter distribution needs the whole sort."""


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """logits [num_rows, vocab_size] float, one spec per row -> token ids [num_rows] int64.

    NO_TOKEN where a row has no finite maximum: any token would be a wrong one.
    """
    assert len(logits) == len(specs), f"{len(logits)} rows for {len(specs)} specs"
    token_ids = logits.argmax(dim=-1)  # the first, so the lowest id, of equal maxima; or a NaN
    finite = logits.gather(1, token_ids.unsqueeze(-1)).isfinite().squeeze(-1)
    token_ids[~finite] = NO_TOKEN
    random = [not spec.sampling.greedy for spec in specs]
    rows = [row for row, ok in enumerate(finite.tolist()) if ok and random[row]]
    if rows:
        token_ids[rows] = _sample_random(logits[rows], [specs[row] for row in rows])
    return token_ids


def _sample_random(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Temperature, top_k, top_p, min_p, then the inverse of the cumulative distribution in token-id
    order. float64 throughout, as 2**17 float32 terms do not sum to 1."""
    logits = logits.double()
    # The largest is 0, so that no temperature, however small, makes an infinity of it.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled = scaled / _column(logits, [spec.sampling.temperature for spec in specs])
    scaled = _filter_top_k(scaled, [spec.sampling.top_k for spec in specs])
    probabilities = scaled.softmax(dim=-1)
    probabilities = _filter_top_p(probabilities, [spec.sampling.top_p for spec in specs])
    probabilities = _filter_min_p(probabilities, [spec.sampling.min_p for spec in specs])
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    drawn = _column(logits, [uniform(spec) for spec in specs]) * total
    # Below the total even if the product rounds up to it, or there would be no id beyond the draw.
    drawn = drawn.minimum(total.nextafter(torch.zeros_like(total)))
    # right=True: the first id whose cumulative sum exceeds the draw, never one of probability 0.
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(-1)


def uniform(spec: SampleSpec) -> float:
    """In [0, 1): 53 bits of BLAKE2b over (seed, choice index, position)."""
    key = struct.pack("<qqq", spec.sampling.seed, spec.choice_index, spec.position)
    digest = blake2b(key, digest_size=8, person=b"twostroke.sample").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _filter_top_k(scaled: Tensor, top_k: Sequence[int]) -> Tensor:
    """-inf below the k-th largest value of a row; 0 keeps all."""
    vocab_size = scaled.shape[-1]
    limits = [min(k, vocab_size) if k else vocab_size for k in top_k]
    rows = [row for row, limit in enumerate(limits) if limit < vocab_size]
    if not rows:
        return scaled
    largest = scaled[rows].topk(max(limits[row] for row in rows)).values
    last = torch.tensor([limits[row] - 1 for row in rows], device=scaled.device)
    threshold = torch.full_like(scaled[:, :1], float("-inf"))
    threshold[rows] = largest.gather(1, last.unsqueeze(-1))
    return scaled.masked_fill(scaled < threshold, float("-inf"))


def _filter_top_p(probabilities: Tensor, top_p: Sequence[float]) -> Tensor:
    """0 below the smallest of the likeliest tokens that together reach p; 1 keeps all."""
    rows = [row for row, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return probabilities
    threshold = torch.zeros_like(probabilities[:, :1])
    threshold[rows] = _top_p_threshold(
        probabilities[rows], _column(probabilities, [top_p[row] for row in rows])
    )
    return probabilities.masked_fill(probabilities < threshold, 0.0)


def _top_p_threshold(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, 1]: probability of the token with which the mass reaches top_p."""
    largest = probabilities.topk(min(NUM_CANDIDATES, probabilities.shape[-1])).values
    mass = largest.cumsum(dim=-1)
    if bool((mass[:, -1:] < top_p).any()):
        largest = probabilities.sort(dim=-1, descending=True).values
        mass = largest.cumsum(dim=-1)
    last = (mass < top_p).sum(dim=-1, keepdim=True)
    return largest.gather(1, last.clamp(max=largest.shape[-1] - 1))


def _filter_min_p(probabilities: Tensor, min_p: Sequence[float]) -> Tensor:
    """0 below min_p times the row's largest probability."""
    if not any(min_p):
        return probabilities
    threshold = probabilities.amax(dim=-1, keepdim=True) * _column(probabilities, min_p)
    return probabilities.masked_fill(probabilities < threshold, 0.0)
