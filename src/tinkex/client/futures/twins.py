"""Deprecated methods: a decorator that warns, and functions that make the `*_async` twins.

A twin is made of the method that replaces it. It calls that method by name, so a subclass or a
patch that replaces the method also replaces what the twin does.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinkex.client.futures.api_future import APIFuture, users_level

P = ParamSpec("P")
T = TypeVar("T")


def deprecated(advice: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a function or method as deprecated: each call warns at the caller's line.

    Args:
        advice: What to use instead, as the end of a sentence.

    Returns:
        A decorator; the message is also the `__deprecated__` of what it returns.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def deprecated_call(*args: P.args, **kwargs: P.kwargs) -> T:
            warnings.warn(called.__deprecated__, FutureWarning, stacklevel=users_level())
            return function(*args, **kwargs)

        called: Any = deprecated_call
        called.__deprecated__ = f"DEPRECATED: {function.__qualname__}() will be removed: {advice}"
        if inspect.iscoroutinefunction(function):
            _mark(called)
        return deprecated_call

    return decorate


def twin(
    method: Callable[P, T], advice: str = "", *, is_ours: bool = False
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make the `*_async` twin of a method; awaiting it gives what the method returns.

    Args:
        method: The method, as it stands in the class body.
        advice: What to use instead; the method itself by default.
        is_ours: Make a twin that is not deprecated, of a method that the official clients lack. It
            does not pass for a coroutine function: programs that trace the official clients stop at
            those that they do not know.

    Returns:
        The twin, to be assigned in the same class body.
    """
    returns_future = "Future" in str(inspect.get_annotations(method).get("return"))
    note = "awaiting it gives the future." if returns_future else "to be awaited."
    return _made(method, note, advice, is_ours=is_ours)


def value_twin(
    method: Callable[P, APIFuture[T]], advice: str = ""
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make the `*_async` twin of a method; awaiting it gives the value of the future that the
    method returns.

    Args:
        method: The method, as it stands in the class body.
        advice: What to use instead; awaiting the method by default.

    Returns:
        The twin, to be assigned in the same class body.
    """
    return _made(method, "awaiting it gives the value.", advice, is_value=True)


def moved(method: Callable[Concatenate[Any, P], T], owner: str) -> Callable[Concatenate[Any, P], T]:
    """Make a deprecated copy of a method that has moved to another class.

    Args:
        method: The method of that class.
        owner: The name of that class.

    Returns:
        The copy, to be assigned in a class body.
    """

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> T:
        return method(*args, **kwargs)

    called.__doc__ = f"Deprecated: use `{owner}.{method.__name__}`."
    return deprecated(f"call {owner}.{method.__name__}(); an {owner} is made the same way")(called)


def _is_plain(function: Any) -> bool:
    return not hasattr(function, "__deprecated__")


def _made(
    method: Callable[..., Any],
    note: str,
    advice: str,
    *,
    is_value: bool = False,
    is_ours: bool = False,
) -> Callable[..., Any]:
    name = method.__name__
    owner = method.__qualname__.rpartition(".")[0]
    instead = advice or f"await {owner}.{name}()"

    async def give(client: Any, args: Any, kwargs: Any) -> Any:
        call = getattr(client, name)
        if hasattr(call, "__deprecated__"):  # the twin has warned already
            call = functools.partial(inspect.unwrap(call, stop=_is_plain), client)
        given = call(*args, **kwargs)
        return await given if is_value else given

    def called(self: Any, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return give(self, args, kwargs)

    functools.update_wrapper(called, method)
    called.__name__, called.__qualname__ = f"{name}_async", f"{method.__qualname__}_async"
    if is_ours:
        called.__doc__ = f"Like `{name}`; {note}"
        return called
    called.__doc__ = f"Deprecated: use `{name}`. Like that; {note}"
    marked = deprecated(instead)(called)
    _mark(marked)
    return marked


def _mark(function: Any) -> None:
    """Let asyncio know that a plain function returns a coroutine."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
