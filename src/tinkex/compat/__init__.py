"""Run programs that `import tinker` on tinkex, unchanged.

The official package may be installed or not.

    import tinkex.compat  # before anything that imports tinker

or without a change to the program: `python -m tinkex.compat PROGRAM …`, or TINKEX_COMPAT=1 with the
hook that `python -m tinkex.compat --install-hook` installs. `uninstall()` undoes it.

Modules of that name are made when they are imported, and hold the same classes: `tinker.Datum is
tinkex.Datum`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tinkex.compat.names import MODULES, PACKAGES, TOP

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["install", "installed", "uninstall"]

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")
"""The directory with a package `tinker` that loads tinkex; for PYTHONPATH of other processes."""


class _Facade(ModuleType):
    """A module of `tinker`, which takes names from tinkex at their first use."""

    def __getattr__(self, name: str) -> Any:
        home = MODULES[self.__name__].get(name)
        if home is None:
            below = f"{self.__name__}.{name}"
            if below in MODULES:
                return import_module(below)
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r} (it is tinkex's, by "
                "tinkex.compat)"
            )
        module, _, attribute = home.partition(":")
        value = getattr(import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        below = (name.rpartition(".") for name in MODULES)
        return sorted(
            {
                *vars(self),
                *MODULES[self.__name__],
                *(name for parent, _, name in below if parent == self.__name__),
            }
        )


class _Finder(MetaPathFinder, Loader):
    """A finder of the modules of `tinker`, and of a distribution of that name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        return ModuleSpec(name, self, origin="tinkex.compat", is_package=name in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Facade(spec.name, f"`{spec.name}`, as tinkex has it.")

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in ("tinker", "tinker._version"):
            module.__dict__["__title__"] = "tinker"
        own = {*TOP, "auth", "types", "__title__", "__version__"}
        module.__dict__["__all__"] = sorted(own if name == "tinker" else MODULES[name])

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        """Yield the distribution, if it is asked for and no place is named."""
        from importlib.metadata import Distribution  # whoever asks has imported it

        if context is not None and (
            "path" in vars(context) or (context.name or "tinker").lower() != "tinker"
        ):
            return
        for place in Path(SHIM).glob("*.dist-info"):
            yield Distribution.at(place)


_finder = _Finder()


def install() -> None:
    """Let `import tinker` and everything below it find tinkex from now on.

    A second call does nothing.

    Raises:
        ImportError: `tinker` itself has been imported already.
    """
    if installed():
        return
    there = sys.modules.get("tinker")
    if there is not None:
        place = getattr(there, "__file__", None) or "somewhere"
        raise ImportError(
            f"tinker has already been imported, from {place}: import tinkex.compat before anything "
            "that imports tinker",
            name="tinker",
        )
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Let `import tinker` find the official package again."""
    if installed():
        sys.meta_path.remove(_finder)
    sys.path[:] = [place for place in sys.path if place != SHIM]
    if inherited := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(
            place for place in inherited.split(os.pathsep) if place != SHIM
        )
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Facade)]:
        del sys.modules[name]


def installed() -> bool:
    """Tell whether `import tinker` finds tinkex."""
    return _finder in sys.meta_path


install()
