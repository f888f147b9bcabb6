"""Futures that programs may still use as they did before, with a warning.

`SampleFuture` is the outcome of a sample, a concurrent future whose methods are deprecated.
`BackcompatClientFuture` is the future of a client, which can still be used as the client.

Methods that make clients used to wait for them. They return such a future now, so programs that
were written before go on working, with a warning for each use. A subclass for one kind of client is
made with `forwarding`.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import warnings
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.client.futures.api_future import (
    APIFuture,
    Future,
    check_own_loop,
    in_users_loop,
    outcome_of,
    users_level,
)
from tinkex.client.futures.loop_thread import give_up

C = TypeVar("C")
T = TypeVar("T")
F = TypeVar("F")
logger = logging.getLogger("tinkex")

_Plain = concurrent.futures.Future

ADVICE = "get the client first, with .result() or await"


class BackcompatClientFuture(APIFuture[C]):
    """The future of a client.

    Args:
        future: Gives the client.
    """

    _future: Future[C]

    def __init__(self, future: Future[C]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> C:
        """Block until the client is there: the same object each time.

        Args:
            timeout: Seconds to wait at most; for ever by default.

        Returns:
            The client.

        Raises:
            TimeoutError: The client is not there yet. It is still being made, so `result()` can be
                called again.
            RuntimeError: Called on tinkex's own thread, which would wait for itself.

        Example:
            >>> service.create_lora_training_client("tinkex/tiny").result(timeout=60)
            TrainingClient('...:train:0')
        """
        check_own_loop(self._future)
        if not self._future.done() and in_users_loop():
            logger.warning(
                "%s.result() blocks the running event loop: await the future instead",
                type(self).__name__,
                stack_info=True,
            )
        return outcome_of(self._future, timeout)

    async def result_async(self, timeout: float | None = None) -> C:
        """Await the client.

        Args:
            timeout: Seconds to wait at most; for ever by default. When they are over, the client is
                given up.

        Returns:
            The client.

        Raises:
            TimeoutError: The client was not there in time, and is not being made any more.

        Example:
            >>> import asyncio
            >>> async def main() -> SamplingClient:
            ...     return await service.create_sampling_client(
            ...         base_model="tinkex/tiny"
            ...     ).result_async(timeout=60)
            >>> asyncio.run(main())
            SamplingClient('...:sample:0')
        """
        try:
            return await self._future.result_async(timeout)
        except TimeoutError:
            if timeout is not None:
                give_up(self._future)
            raise

    def future(self) -> concurrent.futures.Future[C]:
        """The concurrent future: `done`, `cancel`, `add_done_callback` and the rest.

        Example:
            >>> import concurrent.futures
            >>> futures = [
            ...     service.create_lora_training_client("tinkex/tiny").future() for _ in range(2)
            ... ]
            >>> len([future.result() for future in concurrent.futures.as_completed(futures)])
            2
        """
        return self._future

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Read an attribute from the client, unless its name is private."""
            if name.startswith("_"):
                raise AttributeError(name, name=name, obj=self)
            return _read(self, name, 3)

    def __repr__(self) -> str:
        future, name = self._future, type(self).__name__
        if not future.done():
            return f"<{name}: pending>"
        if future.cancelled():
            return f"<{name}: cancelled>"
        if (error := future.exception()) is not None:
            return f"<{name}: failed: {error!r}>"
        return repr(future.result())

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be pickled: {ADVICE}")


def forwarding(client_class: type[Any]) -> Callable[[type[F]], type[F]]:
    """Give the future of a client forwarders for the public names of the client's class.

    A forwarder warns, waits for the client, and calls the method that the client then has: a method
    that was replaced on the client's class is found.

    Args:
        client_class: The client's class.

    Returns:
        A decorator for a subclass of `BackcompatClientFuture`.
    """

    def decorate(future_class: type[F]) -> type[F]:
        for name, member in inspect.getmembers_static(client_class):
            if name.startswith("__"):
                continue
            if isinstance(member, property):
                setattr(future_class, name, _property(name, member.__doc__))
            elif inspect.isfunction(member) and not name.startswith("_"):
                setattr(future_class, name, _forwarder(future_class.__name__, name, member))
        return future_class

    return decorate


def _property(name: str, doc: str | None) -> property:
    def read(self: Any) -> Any:
        if name.startswith("_"):
            raise AttributeError(name, name=name, obj=self)
        return _read(self, name, 3)

    return property(read, doc=doc)


def _read(future: BackcompatClientFuture[Any], name: str, level: int) -> Any:
    owner = type(future).__name__
    warnings.warn(
        f"DEPRECATED: {owner}.{name} will be removed: {ADVICE}", FutureWarning, stacklevel=level
    )
    return getattr(future.result(), name)


def _forwarder(owner: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of a client's future that calls the client's."""
    message = f"DEPRECATED: {owner}.{name}() will be removed: {ADVICE}"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(message, FutureWarning, stacklevel=users_level())
        return getattr(self.result(), name)(*args, **kwargs)

    def forward_async(self: Any, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        warnings.warn(message, FutureWarning, stacklevel=users_level())

        async def forwarding() -> Any:
            return await getattr(await self.result_async(), name)(*args, **kwargs)

        return forwarding()

    made = forward_async if name.endswith("_async") else forward
    made.__name__, made.__qualname__, made.__module__ = name, f"{owner}.{name}", method.__module__
    made.__doc__ = (
        f"Deprecated: use `{method.__qualname__}` of the client itself, which .result() "
        "or await gives."
    )
    made.__annotations__ = dict(method.__annotations__)
    return made


class SampleFuture(Future[T]):
    """The outcome of `sample` or `compute_logprobs`: a `concurrent.futures.Future` and an
    `APIFuture`.

    `await`, `.result()`, `.future()` and `concurrent.futures.wait` are the ways to use it. `done`,
    `cancel` and the other methods of a concurrent future work, with a warning: they will be found
    on `.future()` alone.

    Example:
        >>> future = sampler.sample(prompt, 1, SamplingParams(max_tokens=8))
        >>> future.future().add_done_callback(lambda done: None)
        >>> future.result()
        SampleResponse([SampledSequence(...)])
    """

    _has_warned = False
    _view: Future[T] | None = None

    def _warn(self, name: str) -> None:
        """Warn once for each object."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"DEPRECATED: {name}() will be removed from the futures of samples: await the "
                "future, call .result(), "
                f"or use .future().{name}()",
                FutureWarning,
                stacklevel=3,
            )

    def future(self) -> concurrent.futures.Future[T]:
        """A plain concurrent future of the same outcome; cancelling it cancels the sample.

        Example:
            >>> sampler.sample(prompt, 1, SamplingParams(max_tokens=500)).future().cancel()
            True
        """
        if self._view is None:
            view = Future(self)
            view._runtime = self._runtime
            self.__dict__.setdefault("_view", view)  # another thread may have been first
        assert self._view is not None
        return self._view

    def cancel(self) -> bool:
        """Give the sample up. Deprecated: use `.future().cancel()`."""
        self._warn("cancel")
        return give_up(self)

    def cancelled(self) -> bool:
        """Return whether the sample was given up. Deprecated: use `.future().cancelled()`."""
        self._warn("cancelled")
        return _Plain.cancelled(self)

    def running(self) -> bool:
        """Return whether the sample is being drawn. Deprecated: use `.future().running()`."""
        self._warn("running")
        return _Plain.running(self)

    def done(self) -> bool:
        """Return whether there is an outcome. Deprecated: use `.future().done()`."""
        self._warn("done")
        return _Plain.done(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, if the sample failed. Deprecated: use `.future().exception()`."""
        self._warn("exception")
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Have a function called at the end. Deprecated: use `.future().add_done_callback()`."""
        self._warn("add_done_callback")
        _Plain.add_done_callback(self, fn)
