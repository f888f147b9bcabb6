"""Engines that worker processes of the tests make; faults are asked for by files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.api import Engine, EngineError
from tinkex.engine.fake import FakeEngine


def slow(delay: float = 0.003) -> Engine:
    """A fake engine whose calls take some milliseconds."""
    return FakeEngine(delay=delay)


@dataclass
class Gated:
    """Holds a method up while a file of its name is in a folder, and notes that it was called."""

    folder: Path

    def __call__(self, method: str, subject: str) -> None:
        """Note the call, and wait."""
        if method == "sample_step" and not (self.folder / "sample_step").exists():
            return
        with (self.folder / f"called-{method}").open("a") as calls:
            calls.write(f"{subject}\n")
        until = time.monotonic() + 20
        while (self.folder / method).exists() and time.monotonic() < until:
            time.sleep(0.005)
        if (self.folder / f"fail-{method}").exists():
            raise EngineError(f"{method} was told to fail", "server")


def gated(folder: str, **options: float) -> Engine:
    """A fake engine that is held up by files; it cannot be made while there is one `no-start`."""
    if Path(folder, "no-start").exists():
        raise EngineError("no GPU is free", "server")
    return FakeEngine(fail=Gated(Path(folder)), **options)  # type: ignore[arg-type]
