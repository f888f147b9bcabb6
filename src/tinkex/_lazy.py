"""Names of a package that are imported when first used.

A package lists its names once, as imports for type checkers (`from x import y as y` under
`TYPE_CHECKING`). `names_of` reads that list from the source, so no second list can differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

IMPORT = re.compile(r"^    from (\S+) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
NAME = re.compile(r"(\w+) as \1\b")


def homes_of(file: str) -> dict[str, str]:
    """Return the module of each name that a package's source lists."""
    with open(file, encoding="utf-8") as opened:  # pathlib costs more than all the rest
        source = opened.read()
    return {name: home for home, text in IMPORT.findall(source) for name in NAME.findall(text)}


def names_of(
    package: str, file: str, *more: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__all__`, `__getattr__` and `__dir__`; `more` names are its own."""
    homes = homes_of(file)
    names = sorted([*homes, *more])

    def get(name: str) -> Any:
        module = sys.modules[package]
        if name not in homes:
            # With name and module, so that Python says what may have been meant.
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=module)
        home = homes[name]
        if home == package:  # a module of the package
            return import_module(f"{package}.{name}")
        value = getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    return names, get, lambda: names
