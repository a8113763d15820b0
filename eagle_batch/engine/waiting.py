"""Requests that have no slot yet, in the order in which they get one."""

from __future__ import annotations

from collections import deque

from eagle_batch.engine.request import Request


class Waiting:
    """First come, first served; the next texts of rows under way go before rows that begin.

    So a row is finished before another is begun, and its keys are still in its slot.
    """

    def __init__(self) -> None:
        self._ahead: deque[Request] = deque()
        self._others: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._ahead) + len(self._others)

    @property
    def first(self) -> Request:
        """The request that comes next."""
        return (self._ahead or self._others)[0]

    def add(self, request: Request) -> None:
        """Queue a request."""
        (self._ahead if request.ahead else self._others).append(request)

    def take(self) -> Request:
        """Take the request that comes next out of the queue."""
        return (self._ahead or self._others).popleft()
