"""Promises: the futures a server has handed out, each by the id under which its result is fetched.

They live in memory. A result may be read more than once; some time after it was read, or when nobody came for it,
it is forgotten and its id answers "gone".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tinkex.engine import EngineError
from tinkex.types.sessions import RequestErrorCategory, RequestFailedResponse

logger = logging.getLogger("tinkex.server")

KEEP_READ = 600.0
KEEP_UNREAD = 24 * 3600.0
KEEP_GONE = 100_000
"""How many expired ids are told from unknown ones."""


@dataclass(slots=True)
class Promise:
    """One operation on its way."""

    request_id: str
    digest: bytes
    session_id: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Any = None
    finished: float = 0.0
    read: float = 0.0

    def settle(self, result: Any) -> None:
        """Give the promise its result."""
        if not self.done.is_set():
            self.result = result
            self.finished = time.monotonic()
            self.done.set()

    def touch(self) -> None:
        """Note that the result has been read."""
        self.read = time.monotonic()

    def fail(self, message: str, category: RequestErrorCategory = RequestErrorCategory.User) -> None:
        """Give the promise a failure."""
        self.settle(RequestFailedResponse(error=message, category=category))


class Promises:
    """All promises of a server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._promises: dict[str, Promise] = {}
        self._gone: dict[str, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = clock

    def get(self, request_id: str) -> Promise | None:
        """A promise that can still be read."""
        return self._promises.get(request_id)

    def is_gone(self, request_id: str) -> bool:
        """Whether a promise was there and has expired."""
        return request_id in self._gone

    def add(self, request_id: str, digest: bytes, session_id: str) -> Promise:
        """Make a new promise."""
        promise = self._promises[request_id] = Promise(request_id, digest, session_id)
        return promise

    def follow(self, promise: Promise, work: Awaitable[Any]) -> None:
        """Settle a promise with what some work gives, whenever it does."""
        task = asyncio.ensure_future(_follow(promise, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def sweep(self) -> None:
        """Forget the results whose time is over."""
        now = self._clock()
        for promise in list(self._promises.values()):
            if not promise.done.is_set():
                continue
            if now - promise.finished > KEEP_UNREAD or (promise.read and now - promise.read > KEEP_READ):
                del self._promises[promise.request_id]
                self._gone[promise.request_id] = None
        for request_id in list(self._gone)[:-KEEP_GONE]:
            del self._gone[request_id]

    def forget_session(self, session_id: str) -> None:
        """Drop everything of a session that is over for good."""
        for promise in [p for p in self._promises.values() if p.session_id == session_id]:
            promise.fail("the session has ended", RequestErrorCategory.User)
            del self._promises[promise.request_id]
            self._gone[promise.request_id] = None


async def _follow(promise: Promise, work: Awaitable[Any]) -> None:
    try:
        promise.settle(await work)
    except EngineError as error:
        promise.fail(str(error), RequestErrorCategory(error.category))
    except Exception as error:
        logger.exception("%s failed", promise.request_id)
        promise.fail(f"internal error: {type(error).__name__}: {error}", RequestErrorCategory.Server)
