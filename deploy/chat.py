"""`twostroke chat`: a conversation in the terminal, answers shown as they come."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigError, TwostrokeError
from deploy.api_client import ApiClient, Message
from deploy.timeline import render

LIFETIME_TRIES = 5
GREETING = "Type a question; /help lists the commands."
HELP = """\
/new    forget the conversation
/help   this
/exit   leave; so do exit, quit and Ctrl-D
Ctrl-C stops an answer."""
LEAVE = ("/exit", "/quit", "exit", "quit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    system: str | None = None
    max_tokens: int = 512
    temperature: float = 0.7
    verbose: bool = False
    """After each answer, show where its time went."""

    def request_fields(self) -> dict[str, object]:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature}

    def opening(self) -> list[Message]:
        return [Message(role="system", content=self.system)] if self.system else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`request_id` is empty when the answer was stopped before its first piece."""

    text: str
    request_id: str


def ask_once(client: ApiClient, question: str, options: ChatOptions) -> int:
    if not question.strip():
        raise ConfigError("the question is empty")
    messages = [*options.opening(), Message(role="user", content=question)]
    answer = stream_answer(client, messages, options)
    if options.verbose:
        show_timeline(client, answer.request_id)
    return 0


def converse(client: ApiClient, options: ChatOptions) -> int:
    """Until end of input or one of LEAVE. An answer that fails is told and forgotten."""
    # Imported here: importing it is what gives input() line editing, and it takes hold of the
    # terminal, which only a conversation should. Some Pythons are built without it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    print(f"{client.model()} at {client.url}. {GREETING}", file=sys.stderr)
    messages = options.opening()
    while (question := _read_question()) is not None:
        if question == "/new":
            messages = options.opening()
        elif question == "/help":
            print(HELP, file=sys.stderr)
        elif _is_command(question):
            print(f"unknown command {question.split()[0]}; /help lists them", file=sys.stderr)
        elif question:
            messages = _turn(client, messages, question, options)
    return 0


def _is_command(question: str) -> bool:
    """`/word ...`; a path is a question's own."""
    return re.match(r"/\w+(\s|$)", question) is not None


def _read_question() -> str | None:
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
    return None if text in LEAVE else text


def _turn(
    client: ApiClient, messages: list[Message], question: str, options: ChatOptions
) -> list[Message]:
    asked = [*messages, Message(role="user", content=question)]
    try:
        answer = stream_answer(client, asked, options)
        if options.verbose:
            show_timeline(client, answer.request_id)
    except TwostrokeError as error:
        print(f"\n{error.message}", file=sys.stderr)
        return messages
    return [*asked, Message(role="assistant", content=answer.text)]


def stream_answer(client: ApiClient, messages: Sequence[Message], options: ChatOptions) -> Answer:
    """Print the answer as it comes. Ctrl-C stops it; what came so far is the answer."""
    text, request_id = "", ""
    deltas = client.chat(messages, **options.request_fields())
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(deltas):
        for delta in deltas:
            request_id = delta.request_id
            text += delta.text
            print(delta.text, end="", flush=True)
    print(flush=True)
    return Answer(text=text, request_id=request_id)


def show_timeline(client: ApiClient, request_id: str) -> None:
    """On standard error. The last worker's times may come a moment after the last token."""
    for attempt in range(LIFETIME_TRIES):
        try:
            life = client.lifetime(request_id)
        except TwostrokeError as error:
            print(f"no timeline: {error.message} (up --debug keeps them)", file=sys.stderr)
            return
        if life.finished is not None or attempt == LIFETIME_TRIES - 1:
            print(render(life), file=sys.stderr)
            return
        time.sleep(0.1)
