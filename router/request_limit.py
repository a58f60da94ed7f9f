"""How many requests may be inside at once. Beyond it, refuse early: before the body is read.

A body that is still arriving holds no place, or a few slow senders would lock everybody out. Such
bodies have a limit of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from core.errors import OverloadedError

READERS_PER_PLACE = 4


class RequestLimit:
    """Counts choices (an HTTP request may ask for several). Never negative, 0 when idle."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self.num_inside = 0
        self.num_reading = 0
        """HTTP requests whose body is arriving."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a body arrives. Raises OverloadedError when it could not enter now, or when too
        many arrive already."""
        self._require_room(1)
        if self.num_reading >= READERS_PER_PLACE * self._max_concurrent:
            raise OverloadedError("too many requests are being sent; try again shortly")
        self.num_reading += 1
        try:
            yield
        finally:
            self.num_reading -= 1

    def enter(self) -> Ticket:
        """A ticket for one choice; leave with it (`with`). Raises OverloadedError when full."""
        ticket = Ticket(self)
        ticket.add(1)
        return ticket

    def take(self, count: int) -> None:
        self._require_room(count)
        self.num_inside += count

    def _require_room(self, count: int) -> None:
        if self.num_inside + count > self._max_concurrent:
            raise OverloadedError(
                f"the server is at its limit of {self._max_concurrent} concurrent requests; "
                "try again shortly"
            )

    def give_back(self, count: int) -> None:
        self.num_inside -= count
        assert self.num_inside >= 0, f"{self.num_inside} requests inside"


class Ticket:
    def __init__(self, limit: RequestLimit) -> None:
        self._limit = limit
        self._count = 0

    def add(self, count: int) -> None:
        """Room for more choices of the same HTTP request. Raises OverloadedError."""
        self._limit.take(count)
        self._count += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._limit.give_back(self._count)
        self._count = 0
