"""An engine that is made at the first call that needs it, as torch loads slowly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinkex.engine.api import BaseModel, Engine, EngineError
from tinkex.engine.base_models import describe

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


def _making(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that makes the engine first."""

    @wraps(method)
    def call(self: LazyEngine, /, *args: P.args, **named: P.kwargs) -> R:
        made: Callable[P, R] = getattr(self.engine(), method.__name__)
        return made(*args, **named)

    return call


def _idle(method: Callable[Concatenate[Any, P], R], answer: R) -> Callable[Concatenate[Any, P], R]:
    """Return a method that has this answer while there is no engine."""
    making = _making(method)

    @wraps(method)
    def call(self: LazyEngine, /, *args: P.args, **named: P.kwargs) -> R:
        return making(self, *args, **named) if self.is_made() else answer

    return call


class LazyEngine(Engine):
    """A stand-in for an engine, made at the first call that needs it and on that thread."""

    def __init__(self, models: Mapping[str, Path], make: Callable[[], Engine]) -> None:
        self._models = [describe(name, directory) for name, directory in models.items()]
        self._make = make
        self._made: Engine | None = None
        self._failure = ""

    def models(self) -> Sequence[BaseModel]:
        """Return the base models on offer."""
        return self._models

    def is_made(self) -> bool:
        """Return whether there is an engine yet."""
        return self._made is not None

    def engine(self) -> Engine:
        """Return the engine; make it once.

        It is not tried again, because a second import of a broken library fails misleadingly.

        Raises:
            EngineError: It cannot be made.
        """
        if self._made is None and not self._failure:
            try:
                self._made = self._make()
            except Exception as error:
                logger.exception("the engine cannot be made")
                self._failure = f"the engine cannot be made: {type(error).__name__}: {error}"
        if self._made is None:
            raise EngineError(self._failure, "server")
        return self._made

    create = _making(Engine.create)
    drop = _idle(Engine.drop, None)
    pass_start = _making(Engine.pass_start)
    pass_step = _idle(Engine.pass_step, ())
    passing = _idle(Engine.passing, False)
    create_loss = _making(Engine.create_loss)
    drop_losses = _idle(Engine.drop_losses, None)
    drop_gradients = _making(Engine.drop_gradients)
    optim_step = _making(Engine.optim_step)
    writer = _making(Engine.writer)
    load = _making(Engine.load)
    snapshot = _making(Engine.snapshot)
    sampler_writer = _making(Engine.sampler_writer)
    load_sampler = _making(Engine.load_sampler)
    point = _making(Engine.point)
    drop_sampler = _idle(Engine.drop_sampler, None)
    sample_start = _making(Engine.sample_start)
    sample_step = _idle(Engine.sample_step, ())
    sample_cancel = _idle(Engine.sample_cancel, None)
    sampling = _idle(Engine.sampling, False)
