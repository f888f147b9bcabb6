"""An engine that is made when there is something to compute: whoever lists what is stored need not
wait for torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tinkex.engine.api import EngineError
from tinkex.engine.families.model_config import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tinkex.engine.api import BaseModel, Engine

IDLE: dict[str, Any] = {
    "drop": None,
    "drop_losses": None,
    "drop_sampler": None,
    "sample_cancel": None,
    "pass_step": (),
    "sample_step": (),
    "passing": False,
    "sampling": False,
}
"""What an engine that has nothing answers, by method."""

logger = logging.getLogger(__name__)


class LateEngine:
    """Stands for an engine over these models; the first call that needs it makes it, on the thread
    that calls.
    """

    def __init__(self, models: Mapping[str, Path], make: Callable[[], Engine]) -> None:
        self._models = [describe(name, directory) for name, directory in models.items()]
        self._make = make
        self._made: Engine | None = None
        self._failure = ""

    def models(self) -> Sequence[BaseModel]:
        """The base models on offer."""
        return self._models

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the engine; which engine is decided when it is called, for that may be much
        later.
        """

        def call(*args: Any, **named: Any) -> Any:
            if self._made is None:
                if name in IDLE:
                    return IDLE[name]
                self._made = self._first()
            return getattr(self._made, name)(*args, **named)

        return call

    def _first(self) -> Engine:
        """Make the engine, once: a library that did not load fails the second time for another
        reason, which misleads.

        Raises:
            EngineError: It cannot be made.
        """
        if not self._failure:
            try:
                return self._make()
            except Exception as error:
                logger.exception("the engine cannot be made")
                self._failure = f"the engine cannot be made: {type(error).__name__}: {error}"
        raise EngineError(self._failure, "server")
