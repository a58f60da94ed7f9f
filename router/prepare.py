"""From a request body to what must be generated: validate, tokenize, fit into the context.

Pure given a tokenizer and the workers' limits, so a long prompt can be prepared in a thread. All
that can be wrong with a request is found here, before any worker hears of it and before any 200.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from router.chat_template import ChatMessage
from router.choice import ChoiceRequest
from router.openai_types import (
    MAX_CHOICES,
    ChatFields,
    CompletionFields,
    GenerationFields,
    parse_body,
)
from router.prompt_bound import PromptBound
from router.registry import ModelLimits
from router.text_stream import TextStream
from router.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may fill the rest of the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    choices: tuple[ChoiceRequest, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
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
        prompt: Any = fields.prompt
        one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts = [prompt] if one else prompt
        if not prompts:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        _check_num_choices(len(prompts), fields.n or 1)
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
        fields: GenerationFields,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        param: str,
        request_id: str,
    ) -> Prepared:
        for prompt in prompts:
            self._check_prompt(prompt, param)
        self._check_token_ids(fields.stop_token_ids or (), "stop_token_ids")
        n = fields.n or 1
        _check_num_choices(len(prompts), n)
        seed = secrets.randbits(62) if fields.seed is None else fields.seed
        choices: list[ChoiceRequest] = []
        for prompt in map(tuple, prompts):
            room = self.limits.max_model_len - len(prompt)
            sampling = _sampling(fields, seed=seed, max_tokens=min(max_tokens, room))
            for choice_index in range(n):
                index = len(choices)
                request = GenerateRequest(
                    request_id=f"{request_id}-{index}" if index else request_id,
                    model=self.model,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    eos_token_ids=self.tokenizer.eos_token_ids,
                    choice_index=choice_index,
                    cache_salt=fields.cache_salt or "",
                )
                opener = self._text_opener(fields, prompt)
                choices.append(ChoiceRequest(index=index, request=request, open_text=opener))
        return Prepared(
            choices=tuple(choices),
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
            return_token_ids=bool(fields.return_token_ids),
            num_prompt_tokens=sum(map(len, prompts)),
        )

    def _text_opener(
        self, fields: GenerationFields, prompt: tuple[int, ...]
    ) -> Callable[[], TextStream]:
        """A completion's text goes on from its prompt; an assistant's turn starts anew."""
        before = prompt if isinstance(fields, CompletionFields) else ()
        stop = fields.stop_strings
        return lambda: self.tokenizer.stream(stop, prompt_token_ids=before)

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param=param)
        if len(prompt) >= self.limits.max_model_len:
            raise self._too_long(str(len(prompt)), param)
        self._check_token_ids(prompt, param)

    def _too_long(self, num_tokens: str, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"this model's maximum context length is {self.limits.max_model_len} tokens, and "
            f"the prompt alone has {num_tokens}, which leaves no room for an answer",
            param=param,
        )

    def _check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = min(self.limits.vocab_size, self.tokenizer.vocab_size)
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is outside the vocabulary of {vocab_size}", param=param
                )


def _sampling(fields: GenerationFields, *, seed: int, max_tokens: int) -> SamplingParams:
    """Omitted means OpenAI's defaults: temperature 1, top_p 1, no other filter."""
    return SamplingParams(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=0 if fields.top_k in (None, -1) else fields.top_k or 0,
        min_p=fields.min_p or 0.0,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
    )


def _role(role: str) -> str:
    """`developer` is OpenAI's newer word for `system`; templates know only the old one."""
    return "system" if role == "developer" else role


def _require_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequestError(f"{name} must be at least 1", param=name)


def _check_num_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n} are more than {MAX_CHOICES} choices",
            param="n" if n > 1 else "prompt",
        )
