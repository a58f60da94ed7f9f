"""What a request does to its logits before a token is chosen: bias, penalties, barred tokens.

Only the entries a request names are touched. A barred token (-inf) stays barred: bars come last,
and what the model itself made -inf is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from core.sampling_params import SamplingParams
from engine.batch import SampleSpec


def is_processed(spec: SampleSpec) -> bool:
    """`process` may change the logits of this spec."""
    sampling = spec.sampling
    return bool(
        sampling.reads_tokens
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or spec.barred_token_ids
    )


def process(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """logits [num_rows, vocab_size] float32 without NaN or +inf, edited in place; a spec per row.

    -inf is what may not be chosen; everything else stays finite.
    """
    _edit(logits, [_biases(spec.sampling) for spec in specs], torch.add)
    _edit(logits, [_repetition_penalties(spec) for spec in specs], _penalize_repetition)
    _edit(logits, [_output_penalties(spec) for spec in specs], torch.sub)
    _bar(logits, specs)


def _edit(
    logits: Tensor,
    operands: Sequence[Mapping[int, float]],
    operation: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """logits[row, token_id] = operation(logits[row, token_id], operands[row][token_id]), in float64
    and rounded once."""
    if not any(operands):
        return
    where = _indices(operands, like=logits)
    before = logits[where].double()
    values = _tensor(chain.from_iterable(o.values() for o in operands), np.float64, like=logits)
    limits = torch.finfo(logits.dtype)
    after = operation(before, values).clamp(limits.min, limits.max)
    logits[where] = after.masked_fill_(before.isneginf(), float("-inf")).to(logits.dtype)


def _indices(token_ids: Sequence[Collection[int]], *, like: Tensor) -> tuple[Tensor, Tensor]:
    """(row, token id) of every id of every row, each [num_ids] int64."""
    rows = torch.arange(len(token_ids)).repeat_interleave(torch.tensor(list(map(len, token_ids))))
    return rows.to(like.device), _tensor(chain.from_iterable(token_ids), np.int64, like=like)


def _tensor(values: Iterable[float], dtype: type[np.generic], *, like: Tensor) -> Tensor:
    """By way of numpy, which reads Python numbers several times faster than torch does."""
    return torch.from_numpy(np.fromiter(values, dtype)).to(like.device)


def _biases(sampling: SamplingParams) -> Mapping[int, float]:
    """Those of one token, should there be several, are added up."""
    biases = dict.fromkeys((token_id for token_id, _ in sampling.logit_bias), 0.0)
    for token_id, bias in sampling.logit_bias:
        biases[token_id] += bias
    return biases


def _repetition_penalties(spec: SampleSpec) -> Mapping[int, float]:
    penalty = spec.sampling.repetition_penalty
    if penalty == 1.0:
        return {}
    return dict.fromkeys({*spec.prompt_token_ids, *spec.output_token_ids}, penalty)


def _penalize_repetition(logits: Tensor, penalties: Tensor) -> Tensor:
    """As in CTRL (arXiv:1909.05858), and for negative logits the other way round, or the penalty
    would favour them."""
    return torch.where(logits > 0, logits / penalties, logits * penalties)


def _output_penalties(spec: SampleSpec) -> Mapping[int, float]:
    presence, frequency = spec.sampling.presence_penalty, spec.sampling.frequency_penalty
    if not (presence or frequency):
        return {}
    counts = Counter(spec.output_token_ids)
    return {token_id: presence + frequency * count for token_id, count in counts.items()}


def _bar(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    for row, spec in enumerate(specs):
        if spec.sampling.allowed_token_ids:
            allowed = _tensor(spec.sampling.allowed_token_ids, np.int64, like=logits)
            kept = logits[row, allowed]
            logits[row] = float("-inf")
            logits[row, allowed] = kept
    barred = [_barred_token_ids(spec, vocab_size=logits.shape[-1]) for spec in specs]
    if any(barred):
        logits[_indices(barred, like=logits)] = float("-inf")


def _barred_token_ids(spec: SampleSpec, vocab_size: int) -> list[int]:
    """Those that would end the output too early, and those that would complete a bad word."""
    output = spec.output_token_ids
    completing = [
        word[-1]
        for word in spec.sampling.bad_words
        if output[len(output) - len(word) + 1 :] == word[:-1]
    ]
    # An EOS that a tokenizer has and the model has not cannot be chosen anyway.
    ending = [token_id for token_id in spec.barred_token_ids if 0 <= token_id < vocab_size]
    return completing + ending
