"""A model's chat template: messages in, prompt text out.

The template comes with the model, so it is foreign code: it runs in jinja2's immutable sandbox,
its output is bounded, and whatever goes wrong in it becomes an InvalidRequestError for `messages`
that shows nothing of our insides. What a template may expect (names, filters, whitespace rules) is
what Hugging Face's `apply_chat_template` gives it. This module knows no tokenizer and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidRequestError

MAX_RENDERED_CHARS = 32 * 1024 * 1024
"""More than any context length holds; a runaway template is stopped here."""

MAX_REASON_CHARS = 200

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What foreign template code can raise when a message has not the shape it expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a chat. `content` is plain text: the API layer joins lists of text parts."""

    role: str
    content: str


class _Refused(jinja2.TemplateError):
    """A refusal whose words are meant for the client."""


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training masks;
    for a prompt only what is inside matters."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    """How templates refuse a conversation."""
    raise _Refused(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda style: now().strftime(style)
    return environment


class ChatTemplate:
    """Renders messages with the template `source`; None means that the model has none.

    A missing or broken template is no reason not to serve the model: completions work without one.
    `problem` says what is wrong (for the log at start), and every `render` then raises it.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        self._max_chars = max_chars
        self._tokens = _present({"bos_token": bos_token, "eos_token": eos_token})
        self._template: jinja2.Template | None = None
        self.problem: str | None = None
        if source is None:
            self.problem = "this model has no chat template: use /v1/completions"
            return
        try:
            self._template = _environment(now).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            self.problem = f"this model's chat template is broken: {_one_line(error)}"

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt text, special tokens included; ends where the assistant's turn begins.

        Raises InvalidRequestError with param "messages".
        """
        if self._template is None:
            raise _refusal(self.problem or "this model has no chat template")
        pieces = self._template.generate(
            messages=[_as_dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
        )
        try:
            return self._join(pieces)
        except _Refused as error:
            raise _refusal(
                f"the chat template refuses these messages: {_one_line(error)}"
            ) from None
        except _TEMPLATE_FAILURES as error:
            # The error's own words could show the template's insides: they stay in the cause.
            raise _refusal("the chat template cannot render these messages") from error

    def _join(self, pieces: Iterable[str]) -> str:
        rendered: list[str] = []
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            if num_chars > self._max_chars:
                raise _Refused(f"the prompt exceeds {self._max_chars} characters")
            rendered.append(piece)
        return "".join(rendered)


def _present(values: Mapping[str, str | None]) -> dict[str, str]:
    """Templates ask `if bos_token is defined`, so an absent token is absent and not empty."""
    return {name: value for name, value in values.items() if value is not None}


def _as_dict(message: ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]
