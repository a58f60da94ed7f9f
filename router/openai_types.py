"""What OpenAI clients send, as strict pydantic models. Pydantic stops at the end of this module.

Parameters are honest: a field is honoured (declared in a model), has no effect on the tokens
(IGNORED), asks for what is off anyway (OFF_VALUES), or the request is refused with 400 and the
field's name. Nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from core.errors import InvalidRequestError, UnsupportedParameterError

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
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
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
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


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class GenerationFields(_Strict):
    """What both endpoints share. None stands for OpenAI's default."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: off."""
    min_p: float | None = None
    seed: int | None = None
    stop: StopString | FastList[StopString] | None = None
    stop_token_ids: FastList[int] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Requests with different salts never share cached blocks."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

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

    def check(self) -> None:
        GenerationFields.check(self)
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
