"""How one request wants its tokens chosen. Validated on construction: an instance is always sane.

Sampling is a pure function of (logits, these parameters, the tokens so far, choice index,
position): nothing here is mutable and nothing here depends on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from core.errors import InvalidRequestError

MAX_STOP_TOKEN_IDS = 128
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""Of what is a count or a token id; it has 32 bits on the wire."""
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64
MAX_ALLOWED_TOKEN_IDS = 65_536


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message, param=param)


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError for an id that the model does not have."""
    _require(set(map(type, token_ids)) <= {int}, param, f"{param}: token ids must be integers")
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        message = f"{param}: token id {token_id} is outside the vocabulary of {vocab_size}"
        _require(0 <= token_id < vocab_size, param, message)


def _is_token_id(value: int) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_bias(value: float) -> bool:
    return type(value) in (int, float) and -100.0 <= value <= 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`temperature` 0 is greedy; each other default switches its feature off.

    What is done to a row of logits, in this order: logit_bias; repetition, presence and frequency
    penalties; allowed_token_ids, bad_words and min_tokens bar tokens; temperature; top_k, top_p,
    min_p, typical_p. Log probabilities are the model's own, before all of it.

    Raises InvalidRequestError naming the parameter when a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    """Locally typical sampling (arXiv:2202.00666)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output
    (arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is barred where the ones before it were just generated."""
    allowed_token_ids: tuple[int, ...] = ()
    """No other token may be chosen; empty allows all."""
    seed: int = 0
    max_tokens: int = 16
    """Output tokens at most, counted over all attempts (output_token_ids included)."""
    min_tokens: int = 0
    """No EOS, no stop token and no stop string ends the output before it has this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the log probability of each output token and of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first."""

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_numbers()
        self._check_tokens()

    def _check_kinds(self) -> None:
        """What callers in Python may get wrong; over the wire kinds are fixed."""
        for name in ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            optional = value is None and name.endswith("logprobs")
            _require(optional or type(value) is int, name, f"{name} must be an integer")
        for name, _, _ in _RANGES:
            _require(type(getattr(self, name)) in (int, float), name, f"{name} must be a number")

    def _check_numbers(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            _require(math.isfinite(value), name, f"{name} must be a finite number")
            _require(low <= value <= high, name, f"{name} must be in [{low:g}, {high:g}]")
        for name in ("top_p", "typical_p", "repetition_penalty"):
            _require(getattr(self, name) > 0.0, name, f"{name} must be above 0")
        _require(0 <= self.top_k <= MAX_COUNT, "top_k", "top_k must be 0 (off) or a 31-bit integer")
        _require(abs(self.seed) <= MAX_SEED, "seed", "seed must fit in 64 bits")
        _require(1 <= self.max_tokens <= MAX_COUNT, "max_tokens", "max_tokens must be at least 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"min_tokens must be between 0 and max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or 0 <= value <= MAX_LOGPROBS
            _require(ok, name, f"{name} must be between 0 and {MAX_LOGPROBS}")

    def _check_tokens(self) -> None:
        for name, limit in (
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
        ):
            ids = getattr(self, name)
            _require(
                len(ids) <= limit and all(map(_is_token_id, ids)),
                name,
                f"{name} must be at most {limit} non-negative integers",
            )
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS
            and all(
                _is_token_id(token_id) and _is_bias(bias) for token_id, bias in self.logit_bias
            ),
            "logit_bias",
            f"logit_bias must be at most {MAX_LOGIT_BIAS} pairs of a token id and a number "
            "in [-100, 100]",
        )
        _require(
            len(self.bad_words) <= MAX_BAD_WORDS
            and all(0 < len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words)
            and all(_is_token_id(token_id) for word in self.bad_words for token_id in word),
            "bad_words",
            f"bad_words must be at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_TOKENS} tokens",
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError for a token id that the model does not have."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", tuple(token_id for token_id, _ in self.logit_bias)),
            ("bad_words", tuple(token_id for word in self.bad_words for token_id in word)),
        ):
            check_token_ids(ids, vocab_size, name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reads_tokens(self) -> bool:
        """The next token depends on which tokens came before, beyond the model's logits."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
        )


_RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
