"""Engines by name: the package's own, and entry points of other packages.

A package offers one in its `pyproject.toml`:

    [project.entry-points."tinkex.engines"]
    mine = "my_package:ENGINE"        # an EngineKind
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tinkex.engine.api import Engine
from tinkex.errors import ConfigurationError

GROUP = "tinkex.engines"
BUILT_IN = {
    "torch": "tinkex.engine.torch.kind:TORCH",
    "fake": "tinkex.engine.fake:FAKE",
}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of engine that can be chosen by its name.

    Attributes:
        make: Makes an engine of models, a device and a dtype. Models are directories or hub ids by
            name; an empty one means the name itself. The device is one that `pick_device` returned;
            the dtype of the base weights is None for the engine's default.
        pick_device: Returns the device for an option such as `auto`, and a device unchanged. Raises
            ConfigurationError when the engine cannot compute there.
    """

    make: Callable[[Mapping[str, str | Path], str, str | None], Engine]
    pick_device: Callable[[str], str]


def find_engine(name: str) -> EngineKind:
    """Import a kind of engine by its name.

    Raises:
        ConfigurationError: There is none of this name, or it cannot be imported.
    """
    found = _entry_point(name)
    if found is None:
        raise ConfigurationError(
            f"there is no engine {name!r}; there are {', '.join(engine_names())}",
            hint="install the package that brings it, or choose one of these",
        )
    try:
        kind = found.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"engine {name!r} cannot be imported from {found.value}: {error}"
        ) from error
    if not isinstance(kind, EngineKind):
        raise ConfigurationError(
            f"engine {name!r} is not usable: {found.value} is a {type(kind).__name__}, not an "
            "EngineKind"
        )
    return kind


def engine_names() -> list[str]:
    """List the engines that can be chosen."""
    return sorted({*BUILT_IN, *entry_points(group=GROUP).names})


def _entry_point(name: str) -> EntryPoint | None:
    """Find an engine; for the package's own, other packages are not searched."""
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], GROUP)
    return next(iter(entry_points(group=GROUP, name=name)), None)
