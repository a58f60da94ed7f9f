"""A small client of our own router, for the command line. Synchronous; knows no workers.

Every failure is a TwostrokeError with one line to show.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import httpx

from core.errors import ConfigError, InternalError, TwostrokeError, error_from_code
from core.lifetime import DecodeTimes, Lifetime, PrefillTimes

CONNECT_S = 5.0
Json = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One streamed piece of an answer. `request_id` is the same in every piece."""

    request_id: str
    text: str
    finish_reason: str | None


class ApiClient:
    """`url` is the router's; http:// and /v1 may stand or not."""

    def __init__(self, url: str) -> None:
        with_scheme = url if "://" in url else f"http://{url}"
        self.url = with_scheme.rstrip("/").removesuffix("/v1")
        # No proxy from the environment: the router is on this machine or on its network.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def model(self) -> str:
        """Name of the model served here."""
        return str(self._get("/v1/models")["data"][0]["id"])

    def cluster(self) -> Json:
        """The router's view of its workers (GET /cluster)."""
        return self._get("/cluster")

    def lifetime(self, request_id: str) -> Lifetime:
        """Raises a TwostrokeError when the router does not keep this request's times."""
        return lifetime_from_json(self._get(f"/debug/requests/{request_id}"))

    def chat(self, messages: Sequence[Message], **options: object) -> Generator[Delta, None, None]:
        """Pieces of the answer as they come. Closing the iterator aborts the request."""
        body = {
            "model": self.model(),
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "stream": True,
            **options,
        }
        with (
            self._failures(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise _error(response)
            request_id = response.headers.get("x-request-id", "")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _deltas(json.loads(line.removeprefix("data: ")), request_id)

    def _get(self, path: str) -> Json:
        with self._failures():
            response = self._http.get(path)
        if response.status_code != httpx.codes.OK:
            raise _error(response)
        tree: Json = response.json()
        return tree

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise ConfigError(
                f"no router answers at {self.url}; start a cluster with `twostroke up`,"
                " or name another router with --url"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise InternalError(f"{self.url}: {error or type(error).__name__}") from error


def _deltas(event: Json, request_id: str) -> Iterator[Delta]:
    if "error" in event:
        raise error_from_code(str(event["error"].get("code")), str(event["error"].get("message")))
    for choice in event["choices"]:
        yield Delta(
            request_id=request_id,
            text=choice["delta"].get("content") or "",
            finish_reason=choice["finish_reason"],
        )


def _error(response: httpx.Response) -> TwostrokeError:
    try:
        error = response.json()["error"]
        return error_from_code(str(error.get("code")), str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return InternalError(f"{response.url}: HTTP {response.status_code}")


def _known(kind: type[Any], tree: Json) -> dict[str, Any]:
    """The members of `tree` that are fields of dataclass `kind`."""
    return {field.name: tree[field.name] for field in fields(kind) if field.name in tree}


def _times(kind: type[T], tree: Json | None) -> T | None:
    return None if tree is None else kind(**_known(kind, tree))


def lifetime_from_json(tree: Json) -> Lifetime:
    """Lifetime as the router's debug page shows it: its fields by name, others ignored."""
    known = _known(Lifetime, tree)
    known["prefill"] = _times(PrefillTimes, known.get("prefill"))
    known["decode"] = _times(DecodeTimes, known.get("decode"))
    return Lifetime(**known)
