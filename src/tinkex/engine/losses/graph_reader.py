"""The arguments of a graph, read from the wire, and its steps.

Names are looked up in the tables of `graph_operations` and nowhere else: no attribute is followed,
nothing is imported or evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkex.engine.losses.graph_checks import (
    Arguments,
    GraphLimits,
    Keywords,
    Operation,
    Refusal,
)
from tinkex.engine.losses.graph_operations import DTYPES, FLOATS, LAYOUTS, MEMORY_FORMATS
from tinkex.types.custom_losses import CustomLossNode

DEVICE_NAME = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]{1,3})?")
TABLES: dict[str, Mapping[str, Any]] = {
    "float": FLOATS,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "memory_format": MEMORY_FORMATS,
}


@dataclass(frozen=True, slots=True)
class Ref:
    """The result of an earlier node."""

    name: str


class Here:
    """The device of the computation, which replaces every device that a graph names."""


HERE = Here()


@dataclass(slots=True)
class Reader:
    """Reads arguments; knows the nodes so far and counts the values of the whole graph."""

    limits: GraphLimits
    known: set[str] = field(default_factory=set)
    count: int = 0

    def read(self, value: Any, depth: int = 0) -> Any:
        """Read an argument of the wire: a plain value, a list, or an object of one key."""
        self.count += 1
        if self.count > self.limits.values:
            raise Refusal(f"the arguments of the graph hold more than {self.limits.values} values")
        if depth > self.limits.depth:
            raise Refusal(f"an argument is nested more than {self.limits.depth} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._number(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return self._items(value, depth)
        if isinstance(value, dict) and len(value) == 1:
            kind, content = next(iter(value.items()))
            return self._tagged(str(kind), content, depth)
        raise Refusal("an argument is neither a plain value, a list, nor an object of one key")

    def _number(self, value: float) -> float:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise Refusal("an integer does not fit 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise Refusal('NaN and infinity must be written as {"float": "nan"}')
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > self.limits.text:
            raise Refusal(f"a text is missing, or longer than {self.limits.text} characters")
        return value

    def _items(self, value: Any, depth: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > self.limits.pieces:
            raise Refusal(f"a list is missing, or longer than {self.limits.pieces} values")
        return [self.read(item, depth + 1) for item in value]

    def _tagged(self, kind: str, content: Any, depth: int) -> Any:
        if kind == "ref":
            if not isinstance(content, str) or content not in self.known:
                raise Refusal(f"refers to {str(content)[:64]!r}, which is no earlier node")
            return Ref(content)
        if kind == "tuple":
            return tuple(self._items(content, depth))
        if kind == "slice":
            parts = self._items(content, depth)
            if len(parts) != 3:
                raise Refusal("a slice has three parts")
            return slice(*parts)
        if kind == "ellipsis" and content is True:
            return Ellipsis
        if kind == "device":
            if DEVICE_NAME.fullmatch(self._text(content)) is None:
                raise Refusal(f"names an unknown device {content[:64]!r}")
            return HERE
        if kind in TABLES:
            text = self._text(content)
            if text not in TABLES[kind]:
                raise Refusal(f"uses {kind} {text[:64]!r}; allowed are {', '.join(TABLES[kind])}")
            return TABLES[kind][text]
        raise Refusal(f"holds an argument of unknown kind {kind[:64]!r}")


@dataclass(frozen=True, slots=True)
class Step:
    """A node with its operation and its arguments, in which references are still open."""

    name: str
    target: str
    operation: Operation
    args: Arguments
    kwargs: Keywords


def at_node(loss: str, node: CustomLossNode | Step) -> str:
    """Return the beginning of an error about a node."""
    return f"custom loss {loss!r}: node {node.name[:64]!r} ({node.target[:64]}): "
