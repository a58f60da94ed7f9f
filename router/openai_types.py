"""What OpenAI clients send, as strict pydantic models. Pydantic stops at the end of this module.

Parameters are honest: a field is honoured (declared in a model), has no effect on the tokens
(IGNORED), asks for what is off anyway (OFF_VALUES), or the request is refused with 400 and the
field's name. Nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError, from_json

from core.errors import InvalidRequestError, UnsupportedParameterError
from core.request import MAX_CHOICES
from core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
)

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 10_000

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",  # without tools there is nothing to call
    }
)
"""Accepted with any value: labels, billing and cache hints that change no token."""

OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Known parameters that are not built: accepted only with null or a value that means "off"."""

T = TypeVar("T", bound="GenerationFields")
Item = TypeVar("Item")
FastList = Annotated[list[Item], Field(fail_fast=True)]
"""Stops at the first bad item: a body of millions of them must not make millions of messages."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """{"token id": bias}. By hand: pydantic would complain of every entry of a bad one."""
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "logit_bias", f"must be an object with at most {MAX_LOGIT_BIAS} entries"
        )
    for token_id, bias in value.items():
        if not token_id.isdecimal() or len(token_id) > 10 or token_id != str(int(token_id)):
            raise PydanticCustomError("logit_bias", 'each key must be a token id, as in "50256"')
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "each value must be a number in [-100, 100]")
    return tuple((int(token_id), float(bias)) for token_id, bias in value.items())


LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_read_logit_bias)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class GenerationFields(_Strict):
    """What both endpoints share. None stands for OpenAI's default."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: off."""
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    bad_words: Annotated[FastList[StopString], Field(max_length=MAX_BAD_WORDS // 2)] | None = None
    """Each is two sequences of tokens: with and without a space before it."""
    allowed_token_ids: (
        Annotated[FastList[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    seed: int | None = None
    stop: StopString | FastList[StopString] | None = None
    stop_token_ids: FastList[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    """Before it no stop string ends the output either."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Requests with different salts never share cached blocks."""
    priority: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None
    """Lower runs earlier."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_generated(self) -> int:
        """Choices of each prompt, those that only compete included."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Rules over several fields. Raises InvalidRequestError."""
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_STRINGS} stop strings are allowed", param="stop"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed when stream is true", param="stream_options"
            )


class CompletionFields(GenerationFields):
    """POST /v1/completions."""

    prompt: str | FastList[str] | FastList[int] | FastList[FastList[int]]
    max_tokens: int | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, as a list."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if one else prompt

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each token's own log probability; None: nothing."""
        return self.logprobs

    @property
    def num_generated(self) -> int:
        return self.best_of or self.n or 1

    def check(self) -> None:
        GenerationFields.check(self)
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequestError(
                f"best_of must be at least n ({n}), not {self.best_of}", param="best_of"
            )
        if self.stream and self.best_of is not None and self.best_of > n:
            raise InvalidRequestError(
                "the best of several answers is known at their end: best_of above n cannot be "
                "streamed",
                param="best_of",
            )


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class MessageFields(_Strict):
    """One turn. Tool messages come with tool calling, which is not built."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | FastList[TextPart] | None = None
    name: None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None

    @property
    def text(self) -> str:
        """Text parts joined as they are; an assistant may have said nothing."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class ChatFields(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[FastList[MessageFields], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Newer than max_tokens: wins over it."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        """As of a completion."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        GenerationFields.check(self)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
            )
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise InvalidRequestError(
                    "only an assistant's content may be null", param=f"messages[{index}].content"
                )


def parse_body(kind: type[T], body: bytes) -> T:
    """Raises InvalidRequestError naming the field; UnsupportedParameterError for one that asks for
    what is not built."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    try:
        fields = kind.model_validate(_without_neutral(value, set(kind.model_fields)))
    except ValidationError as error:
        raise _explain(error) from None
    fields.check()
    return fields


def _without_neutral(value: dict[str, Any], honoured: set[str]) -> dict[str, Any]:
    """Drop what changes nothing; refuse a known parameter that is on."""
    kept = {}
    for name, given in value.items():
        if name in honoured:
            kept[name] = given
        elif name in OFF_VALUES:
            if given is not None and not _is_off(name, given):
                raise UnsupportedParameterError(
                    f"{name} is not supported by this server", param=name
                )
        elif name not in IGNORED:
            raise UnsupportedParameterError(
                f"{name[:64]!r} is not a parameter of this server", param=name[:64]
            )
    return kept


def _is_off(name: str, given: Any) -> bool:
    """Equal to an off value and of its type: false is not 0, but 0.0 is."""
    return any(
        given == off and isinstance(given, bool) == isinstance(off, bool)
        for off in OFF_VALUES[name]
    )


def _explain(error: ValidationError) -> InvalidRequestError:
    """A union complains once per alternative: show the complaint of the one that got furthest."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    worst = max(details, key=lambda detail: _depth(detail["loc"]))
    path = ""
    for part in worst["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_LABELS:
            path += f".{part}" if path else part
    text = f"{path}: {worst['msg']}" if path else worst["msg"]
    if worst["type"] == "extra_forbidden":
        return UnsupportedParameterError(f"{path} is not supported by this server", param=path)
    return InvalidRequestError(text, param=path or None)


def _depth(location: tuple[int | str, ...]) -> tuple[int, tuple[int, ...]]:
    return len(location), tuple(part for part in location if isinstance(part, int))


_UNION_LABELS = frozenset({"str", "int", "TextPart"})
"""What pydantic puts into a location to tell the alternatives of a union apart."""
