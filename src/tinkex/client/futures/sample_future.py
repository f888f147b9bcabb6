"""SampleFuture: the outcome of a sample, a concurrent future whose methods are deprecated."""

from __future__ import annotations

import concurrent.futures
import warnings
from collections.abc import Callable
from typing import TypeVar

from tinkex.client.futures.api_future import Future
from tinkex.client.futures.loop_thread import give_up

T = TypeVar("T")

_Plain = concurrent.futures.Future


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
