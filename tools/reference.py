"""For the documentation site: how the reference shows the code.

A docstring's `Example:` is shown as code, as `Examples:` is. A record has a signature of its
fields, as a dataclass has. An attribute without words of its own is not shown when the signature or
a base class tells of it, nor is a constant that nobody describes.
"""

from __future__ import annotations

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
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )

    def on_module_members(self, *, mod: Any, **_: Any) -> None:
        """List the public names of a package, which are the names it imports."""
        if mod.exports is None and mod.is_init_module:
            mod.exports = [name for name, member in mod.members.items() if member.is_alias]

    def on_package(self, *, pkg: Any, loader: Any, **_: Any) -> None:
        """Make signatures of fields; take away what says nothing."""
        # before fields are taken away
        griffe.DataclassesExtension().on_package(pkg=pkg, loader=loader)
        for place in [pkg, *_inside(pkg)]:
            told = {"logger"}
            if place.is_class:
                if fields := _fields(place):
                    place.set_member("__init__", _initializer(place, fields))
                if "__init__" in place.members:  # else it is inherited
                    for parameter in list(place.parameters):
                        if parameter.name.startswith("_"):
                            del place.members["__init__"].parameters[parameter.name]
                told |= {parameter.name for parameter in place.parameters}
                told |= {
                    name
                    for base in place.mro()
                    for name, member in base.members.items()
                    if member.docstring
                }
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
    """Return the parameters of a record's constructor; none for others."""
    if "__init__" in cls.members:
        return {}
    try:
        kind = getattr(importlib.import_module(cls.module.path), cls.name, None)
    except ImportError:  # torch is not there
        return {}
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return {}
    return inspect.signature(kind).parameters


def _initializer(cls: Any, fields: Mapping[str, inspect.Parameter]) -> Any:
    """A constructor with these fields, their kinds and defaults as the sources have them."""
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for name, field in fields.items():
        homes = (
            home
            for home in [cls, *cls.mro()]
            if name in home.members and home.members[name].is_attribute
        )
        written = next((home.members[name] for home in homes), griffe.Attribute(name))
        is_made = written.value is None or "field(" in str(written.value)
        default = None if field.default is field.empty else "..." if is_made else written.value
        kind = griffe.ParameterKind[field.kind.name.lower()]
        parameters.append(
            griffe.Parameter(name, annotation=written.annotation, kind=kind, default=default)
        )
    return griffe.Function(
        "__init__", parameters=griffe.Parameters(*parameters), parent=cls, returns="None"
    )
