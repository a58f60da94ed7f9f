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
from core.sampling_params import SamplingParams

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
        if max(self.token_ids) >= vocab_size:
            raise InvalidRequestError(
                f"token id {max(self.token_ids)} is outside the vocabulary of {vocab_size}",
                param="prompt",
            )
        if self.num_remaining_tokens < 1:
            raise InvalidRequestError("no output token is left to generate", param="max_tokens")

    def stop_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Why generation ends with `token_id` as output token number `num_output_tokens`, if so.

        The one place that knows the rule, so that a first token sampled at prefill and any later
        one sampled at decode end a request alike.
        """
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.STOP
        if num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request. `finish_reason` is set on the last chunk only.

    The token that stopped generation (EOS or a stop token) is included in `token_ids`: it counts as
    generated, the detokenizer is what keeps it from the client's text.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one engine step says of one sequence. Exactly one of these shapes:

    tokens and no reason: it goes on here; tokens and `finish_reason`: done; tokens and `handle`:
    prefill is done and decode goes on elsewhere; `error`: it ended here, its blocks are free.
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...] = ()
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
