"""Logs of the samples that have ended, for clients that poll for many; results compared."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Generic, Protocol, TypeVar

from tinkex.wire import codec

logger = logging.getLogger("tinkex.server")


class Numbered(Protocol):
    """The end of a sample, with its place in the log."""

    number: int


T = TypeVar("T", bound=Numbered)


def first_cursor() -> int:
    """Return the first number of a new log, which is above those of all earlier logs.

    No log ends more samples than there are microseconds.
    """
    return time.time_ns() // 1000


class Log(Generic[T]):
    """The samples of one client that have ended and that it has not acknowledged, by number.

    Numbers go up from one log to the next, so that a cursor of an earlier one, closed with its
    session or in an earlier life of the server, never hides anything.
    """

    def __init__(self, session_id: str, first: int) -> None:
        self.session_id = session_id
        self.cursor = self._first = first
        self.polled = time.monotonic()
        self.is_closed = False
        self._ended: dict[int, T] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def is_untouched(self) -> bool:
        """Return whether nothing was ever noted."""
        return self.cursor == self._first

    def add(self, promise: T) -> None:
        """Note the end of a sample."""
        self.cursor += 1
        promise.number = self.cursor
        self._ended[promise.number] = promise
        self._news.set()

    def remove(self, promise: T) -> None:
        """Forget a sample whose result is forgotten."""
        self._ended.pop(promise.number, None)

    def until(self, cursor: int) -> list[T]:
        """Return the samples that were noted up to a number."""
        return [promise for number, promise in self._ended.items() if number <= cursor]

    def after(self, cursor: int) -> list[T]:
        """Return the samples that were noted after a number."""
        return [promise for number, promise in self._ended.items() if number > cursor]

    async def wait(self, cursor: int) -> None:
        """Wait until something comes after a number, or the log is closed."""
        self.polled = time.monotonic()
        while not self.is_closed and not self.after(cursor):
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        """End all waiting."""
        self.is_closed = True
        self._ended.clear()
        self._news.set()


def came_out_otherwise(request_id: str, told: Any, again: Any) -> bool:
    """Report a result that was told, and is another one now that it was made again."""
    first, second = (codec.encode(result, as_protobuf=False).data for result in (told, again))
    if first == second:
        return False
    logger.error("%s has come out otherwise when it was made again; the first stands", request_id)
    return True
