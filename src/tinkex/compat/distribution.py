"""What `importlib.metadata` hears about a package called `tinker`: that it is there, and in which
version.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from tinkex.compat import SHIM


def find(context: DistributionFinder.Context | None) -> Iterator[Distribution]:
    """The distribution, if it is looked for and not somewhere in particular."""
    if context is not None and (
        "path" in vars(context) or (context.name or "tinker").lower() != "tinker"
    ):
        return
    for place in Path(SHIM).glob("*.dist-info"):
        yield Distribution.at(place)
