"""Waiting for several futures at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


def await_many(
    futures: Iterable[concurrent.futures.Future[T]], timeout: float | None = None
) -> list[T | BaseException]:
    """Return the result of each future in order, or its error; never raise.

    Each is waited for in turn, for `timeout` seconds at most. One that is late has `TimeoutError`
    in its place.

    Args:
        futures: What to wait for.
        timeout: Seconds for each; for ever by default.

    Returns:
        A result or an error for each.

    Example:
        >>> params = SamplingParams(max_tokens=8)
        >>> await_many([sampler.sample(prompt, 1, params) for _ in range(2)])
        [SampleResponse(...), SampleResponse(...)]
    """
    outcomes: list[T | BaseException] = []
    for future in futures:
        try:
            outcomes.append(future.result(timeout))
        except Exception as error:
            outcomes.append(error)
    return outcomes


async def await_many_async(
    futures: Iterable[Awaitable[T]], timeout: float | None = None
) -> list[T | BaseException]:
    """Like `await_many`, in an event loop; all are waited for at once.

    Args:
        futures: What to wait for; anything that can be awaited.
        timeout: Seconds for all of them; for ever by default.

    Returns:
        A result or an error for each.

    Example:
        >>> import asyncio
        >>> async def main() -> list[SampleResponse | BaseException]:
        ...     return await await_many_async(
        ...         [sampler.sample(prompt, 1, SamplingParams(max_tokens=8))]
        ...     )
        >>> asyncio.run(main())
        [SampleResponse(...)]
    """

    async def outcome(future: Awaitable[T]) -> T:
        async with asyncio.timeout(timeout):
            return await future

    return await asyncio.gather(*(outcome(future) for future in futures), return_exceptions=True)
