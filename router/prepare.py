"""From a request body to what must be generated: validate, tokenize, fit into the context.

Pure given a tokenizer and the workers' limits, so a long prompt can be prepared in a thread. All
that can be wrong with a request is found here, before any worker hears of it and before any 200.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeGuard

from core.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from core.request import MAX_CHOICES, GenerateRequest
from core.sampling_params import SamplingParams, check_token_ids
from router.chat_template import ChatMessage
from router.choice import ChoiceRequest, Echo
from router.openai_types import ChatFields, CompletionFields, parse_body
from router.prompt_bound import PromptBound
from router.registry import ModelLimits
from router.text_stream import TextStream
from router.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may fill the rest of the context."""


Fields = ChatFields | CompletionFields


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    choices: tuple[ChoiceRequest, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: bool
    n: int
    best_of: int
    """Choices of each prompt; the client gets the best `n` of them."""
    num_prompt_tokens: int
    """Each prompt counted once, however many choices it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparer:
    """What a request is prepared with. Every method may run in a thread."""

    model: str
    tokenizer: Tokenizer
    limits: ModelLimits
    bound: PromptBound

    def chat(self, body: bytes, request_id: str) -> Prepared:
        """Raises InvalidRequestError."""
        fields = parse_body(ChatFields, body)
        self._check_model(fields.model)
        messages = [ChatMessage(role=_role(m.role), content=m.text) for m in fields.messages]
        if len(body) >= self.limits.max_model_len:  # or it is not worth to render twice
            self._check_size(self.tokenizer.render_chat(messages), "messages")
        prompt = self.tokenizer.encode_chat(messages)
        max_tokens = fields.max_completion_tokens or fields.max_tokens
        for name in ("max_completion_tokens", "max_tokens"):
            _require_positive(name, getattr(fields, name))
        return self._prepare(
            fields,
            [prompt],
            max_tokens=self.limits.max_model_len if max_tokens is None else max_tokens,
            param="messages",
            request_id=request_id,
        )

    def completion(self, body: bytes, request_id: str) -> Prepared:
        """Raises InvalidRequestError."""
        fields = parse_body(CompletionFields, body)
        self._check_model(fields.model)
        _require_positive("max_tokens", fields.max_tokens)
        prompts = self._encode_prompts(fields)
        return self._prepare(
            fields,
            prompts,
            max_tokens=fields.max_tokens or DEFAULT_COMPLETION_TOKENS,
            param="prompt",
            request_id=request_id,
        )

    def _check_model(self, model: str) -> None:
        if model != self.model:
            raise ModelNotFoundError(
                f"the model {model[:128]!r} does not exist here; this server has {self.model!r}",
                param="model",
            )

    def _encode_prompts(self, fields: CompletionFields) -> list[Sequence[int]]:
        prompts = fields.prompts
        if not prompts:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        _check_num_choices(len(prompts), fields)
        for each in prompts:
            if isinstance(each, str):
                self._check_size(each, "prompt")
        return [self._encode(p) if isinstance(p, str) else p for p in prompts]

    def _encode(self, text: str) -> list[int]:
        token_ids = self.tokenizer.encode(text, add_special_tokens=True)
        self._check_prompt(token_ids, "prompt")  # here: the next one may take as long
        return token_ids

    def _check_size(self, text: str, param: str) -> None:
        """Before tokenization, whose time grows with the text, however hopeless."""
        at_least = self.bound.min_tokens(text)
        if at_least > self.limits.max_model_len:
            raise self._too_long(f"at least {at_least}", param)

    def _prepare(
        self,
        fields: Fields,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        param: str,
        request_id: str,
    ) -> Prepared:
        for prompt in prompts:
            self._check_prompt(prompt, param)
        _check_num_choices(len(prompts), fields)
        sampling = self._sampling(fields, max_tokens=min(max_tokens, self.limits.max_model_len))
        requests = [self._request(fields, tuple(p), sampling, request_id) for p in prompts]
        choices = tuple(chain(*(self._choices(fields, i, r) for i, r in enumerate(requests))))
        return Prepared(
            choices=choices,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
            return_token_ids=bool(fields.return_token_ids),
            logprobs=fields.num_logprobs is not None,
            n=fields.n or 1,
            best_of=fields.num_generated,
            num_prompt_tokens=sum(map(len, prompts)),
        )

    def _request(
        self,
        fields: Fields,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str,
    ) -> GenerateRequest:
        room = self.limits.max_model_len - len(prompt)
        request = GenerateRequest(
            request_id=request_id,
            model=self.model,
            prompt_token_ids=prompt,
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            eos_token_ids=self.tokenizer.eos_token_ids,
            cache_salt=fields.cache_salt or "",
            priority=fields.priority or 0,
        )
        request.check(self._vocab_size)
        return request

    def _choices(
        self, fields: Fields, number: int, request: GenerateRequest
    ) -> Iterator[ChoiceRequest]:
        """Those of prompt `number`."""
        echo = self._echo(fields, number, request.prompt_token_ids)
        opener = self._text_opener(fields, request.prompt_token_ids)
        for choice_index in range(fields.num_generated):
            index = number * fields.num_generated + choice_index
            request_id = f"{request.request_id}-{index}" if index else request.request_id
            yield ChoiceRequest(
                index=index,
                request=replace(request, request_id=request_id, choice_index=choice_index),
                open_text=opener,
                token_bytes=self.tokenizer.token_bytes,
                echo=echo,
            )

    def _text_opener(self, fields: Fields, prompt: tuple[int, ...]) -> Callable[[], TextStream]:
        """A completion's text goes on from its prompt; an assistant's turn starts anew."""
        return lambda: self.tokenizer.stream(
            fields.stop_strings,
            min_tokens=fields.min_tokens or 0,
            prompt_token_ids=prompt if isinstance(fields, CompletionFields) else (),
        )

    def _echo(self, fields: Fields, number: int, prompt: tuple[int, ...]) -> Echo | None:
        if not _wants_echo(fields):
            return None
        given = fields.prompts[number]
        written = given if isinstance(given, str) else None
        text, offsets = self.tokenizer.read_prompt(prompt, written)
        return Echo(text=text, offsets=offsets)

    def _sampling(self, fields: Fields, *, max_tokens: int) -> SamplingParams:
        """Omitted means OpenAI's defaults: temperature 1, top_p 1, all else off."""
        num_logprobs, picks_best = fields.num_logprobs, fields.num_generated > (fields.n or 1)
        given = {name: value for name in _AS_GIVEN if (value := getattr(fields, name)) is not None}
        return SamplingParams(
            **given,
            top_k=0 if fields.top_k in (None, -1) else fields.top_k or 0,
            bad_words=self.tokenizer.encode_bad_words(fields.bad_words or ()),
            allowed_token_ids=tuple(fields.allowed_token_ids or ()),
            seed=secrets.randbits(62) if fields.seed is None else fields.seed,
            max_tokens=max_tokens,
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            logprobs=0 if picks_best and num_logprobs is None else num_logprobs,
            prompt_logprobs=num_logprobs if _wants_echo(fields) else None,
        )

    @property
    def _vocab_size(self) -> int:
        return min(self.limits.vocab_size, self.tokenizer.vocab_size)

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param=param)
        if len(prompt) >= self.limits.max_model_len:
            raise self._too_long(str(len(prompt)), param)
        check_token_ids(prompt, self._vocab_size, param)

    def _too_long(self, num_tokens: str, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"this model's maximum context length is {self.limits.max_model_len} tokens, and "
            f"the prompt alone has {num_tokens}, which leaves no room for an answer",
            param=param,
        )


def _wants_echo(fields: Fields) -> TypeGuard[CompletionFields]:
    return isinstance(fields, CompletionFields) and bool(fields.echo)


_AS_GIVEN = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
)
"""Fields that mean the same to SamplingParams, defaults included."""


def _role(role: str) -> str:
    """`developer` is OpenAI's newer word for `system`; templates know only the old one."""
    return "system" if role == "developer" else role


def _require_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequestError(f"{name} must be at least 1", param=name)


def _check_num_choices(num_prompts: int, fields: Fields) -> None:
    count = fields.num_generated
    if num_prompts * count > MAX_CHOICES:
        name = "n" if count == (fields.n or 1) else "best_of"
        raise InvalidRequestError(
            f"{num_prompts} prompts with {name}={count} are more than {MAX_CHOICES} choices",
            param=name if count > 1 else "prompt",
        )
