"""The ask and the answer as values: GenerateRequest goes in, TokenChunk comes out.

A request plus its output tokens so far is a complete value: `with_output` makes the one that any
other worker can continue. Preemption, worker death, drain and a lost transfer all recover that way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from core.errors import InvalidRequestError, TwostrokeError
from core.kv import KVHandle
from core.lifetime import DecodeTimes, PrefillTimes
from core.sampling_params import MAX_COUNT, SamplingParams, check_token_ids

MAX_CHOICES = 128

RequestKey = tuple[str, int]
"""(request_id, attempt): two attempts of one request are different things to a worker."""


class FinishReason(StrEnum):
    STOP = "stop"
    """EOS, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's context length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One immutable ask. `(request_id, attempt)` fences off zombies of earlier attempts."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    """Tokens earlier attempts already gave the client; they are input now, not output."""
    attempt: int = 0
    choice_index: int = 0
    cache_salt: str = ""
    """Tenant salt of the prefix hash chain: equal salts may share blocks, others never do."""
    priority: int = 0
    """Lower runs earlier and is preempted later; equal ones go by arrival."""
    num_choices: int = 1
    """Answers wanted, numbered from choice_index on: the colocated engine reads the prompt once
    and lets all of them share its blocks. A worker takes one choice per request."""

    @property
    def key(self) -> RequestKey:
        return self.request_id, self.attempt

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything that must be computed before the next token: prompt, then output so far."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_remaining_tokens(self) -> int:
        return self.sampling.max_tokens - len(self.output_token_ids)

    def with_output(self, output_token_ids: tuple[int, ...]) -> GenerateRequest:
        """The same ask, to be continued by another attempt after `output_token_ids`."""
        return replace(self, output_token_ids=output_token_ids, attempt=self.attempt + 1)

    def check(self, vocab_size: int) -> None:
        """What would crash a step or corrupt a neighbour must not get in: InvalidRequestError."""
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        check_token_ids(self.token_ids, vocab_size, "prompt")
        if self.num_remaining_tokens < 1:
            raise InvalidRequestError("no output token is left to generate", param="max_tokens")
        for name in ("priority", "choice_index"):
            value = getattr(self, name)
            if type(value) is not int or abs(value) > MAX_COUNT:
                raise InvalidRequestError(f"{name} must be a 31-bit integer", param=name)
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequestError(f"n must be between 1 and {MAX_CHOICES}", param="n")
        self.sampling.check_vocabulary(vocab_size)
        self._check_something_is_allowed()

    def _check_something_is_allowed(self) -> None:
        """At the first step, as far as the request alone can tell."""
        sampling = self.sampling
        barred = {word[0] for word in sampling.bad_words if len(word) == 1}
        if sampling.min_tokens:
            barred.update(self.ending_token_ids)
        if sampling.allowed_token_ids and barred.issuperset(sampling.allowed_token_ids):
            raise InvalidRequestError(
                "bad_words and min_tokens bar every token of allowed_token_ids",
                param="allowed_token_ids",
            )

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the output; the sampler bars them until min_tokens are there."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return (*self.sampling.stop_token_ids, *eos)

    def stop_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Why generation ends with `token_id` as output token number `num_output_tokens`, if so.

        The one place that knows the rule, so that a first token sampled at prefill and any later
        one sampled at decode end a request alike.
        """
        if token_id in self.ending_token_ids and num_output_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What the model itself thought of one token: natural logarithms, before any penalty, bias,
    temperature or filter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability) of the likeliest tokens, likeliest first, as many as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request. `finish_reason` is set on the last chunk only.

    The token that stopped generation (EOS or a stop token) is included in `token_ids`: it counts as
    generated, the detokenizer is what keeps it from the client's text.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where the request wants them, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first token of the first choice, where the request wants them: of every prompt token
    but the first."""
    score: float | None = None
    """Of an answer of a beam search: sum of its log probabilities / length ** length_penalty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one engine step says of one sequence. Exactly one of these shapes:

    tokens and no reason: it goes on here; tokens and `finish_reason`: done; tokens and `handle`:
    prefill is done and decode goes on elsewhere; `error`: it ended here, its blocks are free.
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where the request wants them, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first token, where the request wants them: of every prompt token but the first."""
    finish_reason: FinishReason | None = None
    error: TwostrokeError | None = None
    handle: KVHandle | None = None
    prefill_times: PrefillTimes | None = None
    decode_times: DecodeTimes | None = None

    @property
    def key(self) -> RequestKey:
        return self.request_id, self.attempt

    @property
    def is_last(self) -> bool:
        """The worker says no more of this request."""
        return bool(self.finish_reason or self.error or self.handle)
