"""For the documentation site: how the reference shows the code.

A docstring's `Example:` is shown as code, as `Examples:` is. A record or dataclass has a signature of its fields; an
attribute that is in the signature and has no words of its own is not shown again below it. Constants that nobody
describes are left out.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import griffe
import msgspec


class Shown(griffe.Extension):  # type: ignore[misc]
    """Changes what was read of the sources into what is shown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Give the section of one object the name that is understood."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Make signatures of fields; take away what says nothing."""
        for place in [pkg, *_inside(pkg)]:
            fields = _fields(place) if place.is_class else {}
            if fields:
                place.set_member("__init__", _initializer(place, fields))
            told = {parameter.name for parameter in place.parameters} if place.is_class else set()
            for member in list(place.members.values()):
                is_bare = not member.is_alias and member.is_attribute and member.docstring is None
                if is_bare and (member.name in told or member.name.isupper()):
                    place.del_member(member.name)


def _inside(place: Any) -> Iterator[Any]:
    """The modules and classes of a module or class."""
    for member in list(place.members.values()):
        if not member.is_alias and (member.is_module or member.is_class):
            yield member
            yield from _inside(member)


def _fields(cls: Any) -> Mapping[str, inspect.Parameter]:
    """What the constructor of a record or dataclass takes; nothing of other classes, or where it is written out."""
    if "__init__" in cls.members:
        return {}
    try:
        kind = getattr(importlib.import_module(cls.module.path), cls.name, None)
    except ImportError:  # torch is not there
        return {}
    if not isinstance(kind, type) or not (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return {}
    return {name: field for name, field in inspect.signature(kind).parameters.items() if not name.startswith("_")}


def _initializer(cls: Any, fields: Mapping[str, inspect.Parameter]) -> Any:
    """A constructor with these fields, their kinds and defaults as the sources have them."""
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for name, field in fields.items():
        homes = (home for home in [cls, *cls.mro()] if name in home.members and home.members[name].is_attribute)
        written = next((home.members[name] for home in homes), griffe.Attribute(name))
        is_made = written.value is None or "field(" in str(written.value)
        default = None if field.default is field.empty else "..." if is_made else written.value
        kind = griffe.ParameterKind[field.kind.name.lower()]
        parameters.append(griffe.Parameter(name, annotation=written.annotation, kind=kind, default=default))
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls, returns="None")
