"""Takes one token per spec: the likeliest, or a random one by the inverse of the cumulative
distribution.

No generator object: the one random number of a token comes from a hash of (seed, choice index,
position), so the same request draws the same numbers on any worker, in any batch, after any
recovery.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from engine.batch import Sampled, SampleSpec
from engine.sampler.filters import filter_tokens
from engine.sampler.processors import is_processed, process

ROWS_AT_ONCE = 8
"""So many float64 rows of a large vocabulary stay in a CPU's cache: several times faster than more
of them."""


def choose(logits: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]) -> list[Sampled]:
    """logits [num_rows, vocab_size] float32; the row of each spec -> the choice of each spec."""
    likeliest = logits.argmax(dim=-1)  # the first, so the lowest id, of equal maxima; or a NaN
    finite = logits.gather(1, likeliest.unsqueeze(-1)).isfinite().squeeze(-1).tolist()
    token_ids = likeliest.tolist()
    sampled = [Sampled(token_ids[row] if finite[row] else None) for row in rows]
    not_done = [
        i
        for i, (row, spec) in enumerate(zip(rows, specs, strict=True))
        if finite[row] and (is_processed(spec) or not spec.sampling.greedy)
    ]
    for start in range(0, len(not_done), ROWS_AT_ONCE):
        part = not_done[start : start + ROWS_AT_ONCE]
        chosen = _choose_from(logits[[rows[i] for i in part]], [specs[i] for i in part])
        for i, choice in zip(part, chosen, strict=True):
            sampled[i] = choice
    return sampled


def _choose_from(logits: Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """One choice per row of finite `logits`, which are overwritten."""
    process(logits, specs)
    token_ids = logits.argmax(dim=-1)
    barred = logits.gather(1, token_ids.unsqueeze(-1)).isneginf().squeeze(-1).tolist()
    rows = [row for row, spec in enumerate(specs) if not (spec.sampling.greedy or barred[row])]
    if rows:
        token_ids[rows] = _draw(logits[rows], [specs[row] for row in rows])
    return [
        Sampled(None, all_barred=True) if all_barred else Sampled(token_id)
        for token_id, all_barred in zip(token_ids.tolist(), barred, strict=True)
    ]


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """A random token id per row, [num_rows] int64. float64 throughout, as 2**17 float32 terms do
    not sum to 1."""
    scaled = logits.double()
    # The largest is 0, so that no temperature, however small, makes an infinity of it.
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= _column([spec.sampling.temperature for spec in specs], like=scaled)
    filter_tokens(scaled, [spec.sampling for spec in specs])
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    drawn = _column([uniform(spec) for spec in specs], like=scaled) * total
    # Below the total even if the product rounds up to it, or there would be no id beyond the draw.
    drawn = drawn.minimum(total.nextafter(torch.zeros_like(total)))
    # right=True: the first id whose cumulative sum exceeds the draw, never one of probability 0.
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(-1)


def uniform(spec: SampleSpec) -> float:
    """In [0, 1): 53 bits of BLAKE2b over (seed, choice index, position)."""
    key = struct.pack("<qqq", spec.sampling.seed, spec.choice_index, spec.position)
    digest = blake2b(key, digest_size=8, person=b"twostroke.sample").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _column(values: Sequence[float], *, like: Tensor) -> Tensor:
    return like.new_tensor(values).unsqueeze(-1)
