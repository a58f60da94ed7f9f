"""What the model itself thought of tokens: log-softmax of its raw logits, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.request import TokenLogprobs


def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int], num_logprobs: int
) -> tuple[TokenLogprobs, ...]:
    """logits [len(next_token_ids), vocab_size]: what each row said of the token that came next."""
    return tuple(
        token_logprobs(row, token_id, num_logprobs)
        for row, token_id in zip(logits, next_token_ids, strict=True)
    )


def token_logprobs(logits: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """logits [vocab_size]; of that token, and of the `count` likeliest."""
    row = logits.cpu().numpy()
    largest = row.max()
    with np.errstate(invalid="ignore"):  # a row that is not finite, whose sequence will fail
        scaled = np.subtract(row, largest, dtype=np.float64)
    log_total = np.log(np.exp(scaled).sum())
    likeliest = _likeliest(row, min(count, len(row)))
    logprobs = (scaled[likeliest] - log_total).tolist()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(scaled[token_id] - log_total),
        top=tuple(zip(likeliest.tolist(), logprobs, strict=True)),
    )


def _likeliest(row: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """The ids of the `count` largest, in that order; of equal ones the lower id first."""
    if count == 0:
        return np.empty(0, np.intp)
    rank = len(row) - count
    token_ids = np.flatnonzero(row >= np.partition(row, rank)[rank])
    return token_ids[np.argsort(-row[token_ids], kind="stable")][:count]
