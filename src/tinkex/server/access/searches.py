"""Searches: an owner has one at a time, and nothing else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tinkex.server.http_errors import Refusal

Request = TypeVar("Request")
Found = TypeVar("Found")


class Searches:
    """The searches under way; those of several owners take turns on two threads."""

    def __init__(self) -> None:
        self.owners: set[str] = set()
        """The owners of searches under way."""
        self._threads = ThreadPoolExecutor(2, "tinkex-search")

    async def run(
        self, owner: str, search: Callable[[Request, str], list[Found]], request: Request
    ) -> list[Found]:
        """Return the results of a search.

        Raises:
            Refusal: The owner has another search under way, or this one took too long.
        """
        if owner in self.owners:
            raise Refusal(
                429, "another search of this account is under way", headers={"Retry-After": "1"}
            )
        self.owners.add(owner)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, search, request, owner)
        except TimeoutError as error:
            raise Refusal(
                400, f"the search was stopped: {error}; search for less, such as one project"
            ) from None
        finally:
            self.owners.discard(owner)

    def close(self) -> None:
        """Wait for the searches under way, and begin no more."""
        self._threads.shutdown()
