"""What the model itself thought of tokens: log-softmax of its raw logits, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.request import TokenLogprobs

ROWS_AT_ONCE = 8
"""As in `choice`; and a long prompt's float64 rows would not fit in memory."""


def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int], num_logprobs: int
) -> tuple[TokenLogprobs, ...]:
    """logits [len(next_token_ids), vocab_size]: what each row said of the token that came next."""
    count = len(next_token_ids)
    assert len(logits) == count, f"{len(logits)} rows for {count} tokens"
    return tuple(token_logprobs(logits, range(count), next_token_ids, [num_logprobs] * count))


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """logits [num_rows, vocab_size]; of each of the `rows` that token, and so many likeliest."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        logprobs = logits[list(rows[part])].double().log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(token_ids[part], device=logits.device).unsqueeze(-1))
        likeliest = _likeliest(logprobs, max(counts[part]))
        found += [
            TokenLogprobs(token_id=token_id, logprob=logprob, top=top[:count])
            for token_id, logprob, top, count in zip(
                token_ids[part], own.squeeze(-1).tolist(), likeliest, counts[part], strict=True
            )
        ]
    return found


def _likeliest(logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """(token id, logprob) of each row's `count` likeliest tokens (all, if there are fewer), in that
    order; of equal ones the lower id first, which topk alone leaves open."""
    count = min(count, logprobs.shape[-1])
    if count == 0:
        return [()] * len(logprobs)
    last = logprobs.topk(count).values[:, -1:]
    rows, token_ids = (logprobs >= last).nonzero(as_tuple=True)  # in order of row, then id
    values = logprobs[rows, token_ids]
    order = values.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    sizes = rows.bincount(minlength=len(logprobs)).tolist()
    return [
        tuple(zip(ids[:count].tolist(), of_row[:count].tolist(), strict=True))
        for ids, of_row in zip(
            torch.split(token_ids[order], sizes), torch.split(values[order], sizes), strict=True
        )
    ]
