"""From logits to tokens: a pure function of each row's logits and its SampleSpecs.

`processors` edits logits, `filters` narrows the distribution, `choice` takes a token from what is
left, `logprobs` reports the model's own view of it. Rows never influence each other: every
operation works along a row, and its result does not depend on how many rows there are. What is
drawn or reported is computed in numpy, a row at a time: such a row stays in a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from engine.batch import Sampled, SampleSpec
from engine.sampler.choice import choose
from engine.sampler.logprobs import prompt_logprobs, token_logprobs

__all__ = ["prompt_logprobs", "sample"]


def sample(
    logits: Tensor, specs: Sequence[Sequence[SampleSpec]], likeliest: Tensor | None = None
) -> list[tuple[Sampled, ...]]:
    """logits [num_rows, vocab_size] float32, left as they are, and the specs of each row (several
    where choices share it) -> one Sampled per spec, grouped in the same way. `likeliest` [num_rows]
    int64 is the lowest id of the largest logits, -1 where that is not finite or one is NaN: given
    where the model's backend knows it already.

    No token for a row that holds a NaN or has no finite maximum: any would be a wrong one.
    """
    assert len(logits) == len(specs), f"{len(logits)} rows for the specs of {len(specs)}"
    rows = [row for row, of_row in enumerate(specs) for _ in of_row]
    flat = [spec for of_row in specs for spec in of_row]
    sampled = choose(logits, rows, flat, likeliest)
    _add_logprobs(sampled, logits, rows, flat)
    results = iter(sampled)
    return [tuple(islice(results, len(of_row))) for of_row in specs]


def _add_logprobs(
    sampled: list[Sampled], logits: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]
) -> None:
    for i, spec in enumerate(specs):
        token_id = sampled[i].token_id
        if spec.num_logprobs is not None and token_id is not None:
            logprobs = token_logprobs(logits[rows[i]], token_id, spec.num_logprobs)
            sampled[i] = sampled[i]._replace(logprobs=logprobs)
