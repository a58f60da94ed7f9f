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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Sampled, SampleSpec
from engine.sampler.filters import filter_tokens
from engine.sampler.processors import is_processed, process


def choose(
    logits: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec], likeliest: Tensor | None
) -> list[Sampled]:
    """logits [num_rows, vocab_size] float32, and `likeliest` as in `sample`; the row of each
    spec -> the choice of each spec."""
    token_ids = (_likeliest(logits) if likeliest is None else likeliest).tolist()
    sampled = [Sampled(None if token_ids[row] < 0 else token_ids[row]) for row in rows]
    for i, (row, spec) in enumerate(zip(rows, specs, strict=True)):
        if token_ids[row] >= 0 and (is_processed(spec) or not spec.sampling.greedy):
            sampled[i] = _choose_from(logits[row], spec)
    return sampled


def _likeliest(logits: Tensor) -> Tensor:
    """As `sample` describes it."""
    if logits.device.type == "cpu":  # where numpy's is 12 times faster than torch's
        token_ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
    else:
        token_ids = logits.argmax(dim=-1)
    finite = logits.gather(1, token_ids.unsqueeze(-1)).isfinite().squeeze(-1)
    return token_ids.where(finite, -1)


def _choose_from(logits: Tensor, spec: SampleSpec) -> Sampled:
    """logits [vocab_size], with a finite maximum."""
    if is_processed(spec):
        logits = logits.clone()
        process(logits.unsqueeze(0), [spec])
    row = logits.cpu().numpy()
    likeliest = row.argmax()
    if np.isneginf(row[likeliest]):
        return Sampled(None, all_barred=True)
    return Sampled(int(likeliest) if spec.sampling.greedy else _draw(row, spec))


def _draw(logits: NDArray[np.float32], spec: SampleSpec) -> int:
    """A random token id. float64 throughout, as 2**17 float32 terms do not sum to 1."""
    # The largest is 0, so that no temperature, however small, makes an infinity of it.
    scaled = np.subtract(logits, logits.max(), dtype=np.float64)
    with np.errstate(over="ignore"):  # to -inf
        scaled /= spec.sampling.temperature
    token_ids, scaled = filter_tokens(scaled, spec.sampling)
    # By way of torch, whose sums are 5 times faster.
    cumulative = torch.from_numpy(np.exp(scaled, out=scaled)).cumsum(0).numpy()
    total = cumulative[-1]
    # Below the total even if the product rounds up to it, or there would be no id beyond the draw.
    drawn = min(uniform(spec) * total, np.nextafter(total, 0.0))
    # The first whose cumulative sum exceeds the draw, never one of probability 0.
    index = int(cumulative.searchsorted(drawn, side="right"))
    return index if token_ids is None else int(token_ids[index])


def uniform(spec: SampleSpec) -> float:
    """In [0, 1): 53 bits of BLAKE2b over (seed, choice index, position)."""
    key = struct.pack("<qqq", spec.sampling.seed, spec.choice_index, spec.position)
    digest = blake2b(key, digest_size=8, person=b"twostroke.sample").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53
