"""How many requests may be inside at once. Beyond it, refuse early: before the body is read."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from core.errors import OverloadedError


class RequestLimit:
    """Counts choices (an HTTP request may ask for several). Never negative, 0 when idle."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self.num_inside = 0

    def enter(self) -> Ticket:
        """A ticket for one choice; leave with it (`with`). Raises OverloadedError when full."""
        ticket = Ticket(self)
        ticket.add(1)
        return ticket

    def take(self, count: int) -> None:
        if self.num_inside + count > self._max_concurrent:
            raise OverloadedError(
                f"the server is at its limit of {self._max_concurrent} concurrent requests; "
                "try again shortly"
            )
        self.num_inside += count

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
