"""From what a caller has to what JSON can say: plain mappings, lists and scalars.

Two marks tell "no value was given" from None, which is a value: `NOT_GIVEN`, the default of a
parameter that may be left out, and `OMIT`, said by a caller who wants an entry left out that would
be there otherwise. Both are falsy, and `transform` drops the entries that hold them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, TypeAlias, TypeGuard, TypeVar, final

import msgspec

from tinkex.types.record import Record, Wired, to_builtins

T = TypeVar("T")
D = TypeVar("D")

Format: TypeAlias = Literal["iso8601"] | Callable[[Any], Any]
"""Format of a value: "iso8601" (the default for times), or a function, whose result is kept."""


class _Mark:
    """A value there is one of, whatever is done to it: copies and pickles are the same object."""

    __slots__ = ()
    _name = ""

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name  # found again by its name in this module


@final
class NotGiven(_Mark):
    """The type of `NOT_GIVEN`.

    Example:
        >>> NotGiven() is NOT_GIVEN, bool(NOT_GIVEN)
        (True, False)
    """

    __slots__ = ()
    _name = "NOT_GIVEN"

    def __new__(cls) -> NotGiven:
        """The one there is."""
        return NOT_GIVEN


@final
class Omit(_Mark):
    """The type of `OMIT`.

    Example:
        >>> transform({"seed": OMIT, "stop": None})
        {'stop': None}
    """

    __slots__ = ()
    _name = "OMIT"

    def __new__(cls) -> Omit:
        """The one there is."""
        return OMIT


NOT_GIVEN: NotGiven = object.__new__(NotGiven)
"""The default of what may be left out where None means something."""

OMIT: Omit = object.__new__(Omit)
"""Leave this out, even if it would be there otherwise."""


def is_given(value: T | NotGiven | Omit) -> TypeGuard[T]:
    """Return True for a value, None included, and False for the two marks.

    Example:
        >>> is_given(None), is_given(NOT_GIVEN), is_given(OMIT)
        (True, False, False)
    """
    return value is not NOT_GIVEN and value is not OMIT


def coalesce(value: T | NotGiven | Omit, default: D) -> T | D:
    """The value, or the default where none was given.

    Example:
        >>> coalesce(NOT_GIVEN, 3), coalesce(None, 3), coalesce(0, 3)
        (3, None, 0)
    """
    return value if is_given(value) else default


def transform(
    data: Any,
    aliases: Mapping[str, str] | None = None,
    formats: Mapping[str, Format] | None = None,
    drop_none: bool = False,
) -> Any:
    """Return plain data from nested mappings, records, dataclasses, models, lists and arrays.

    Entries that hold `NOT_GIVEN` or `OMIT` are dropped, keys become strings, times ISO-8601 text,
    and numpy's numbers and arrays plain ones. What it does not know, such as bytes, passes.

    Args:
        data: What to transform; one of the marks itself gives None.
        aliases: Other names for keys, at any depth; `ValueError` if two entries end up under one
            name.
        formats: How to write the values under these keys (their names before aliases), at any
            depth; None stays None.
        drop_none: Drop the entries of mappings and objects that hold None, but not those a record
            must send as null.

    Example:
        >>> transform({"a": OMIT, "b": None, 3: (1, dt.date(2026, 1, 2))}, aliases={"b": "c"})
        {'c': None, '3': [1, '2026-01-02']}
    """
    for key, form in (formats or {}).items():
        if form != "iso8601" and not callable(form):
            raise ValueError(
                f"the format of {key!r} is {form!r}; it can be 'iso8601' or a function"
            )
    return (
        _Transformer(aliases or {}, formats or {}, drop_none).plain(data)
        if is_given(data)
        else None
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Transformer:
    aliases: Mapping[str, str]
    formats: Mapping[str, Format]
    drop_none: bool

    def plain(self, value: Any) -> Any:
        if value is None or type(value) in (str, int, float, bool):
            return value
        if isinstance(value, dt.date | dt.time):  # a datetime is a date
            return _iso8601(value)
        if isinstance(value, Enum):
            return self.plain(value.value)
        if isinstance(value, Mapping):
            return self.entries(value)
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value if is_given(item)]
        if isinstance(value, Wired):
            return self.plain(to_builtins(value, keep_none=True))
        if hasattr(value, "tolist") and hasattr(value, "dtype"):
            listed = value.tolist()
            return (
                listed
                if getattr(value.dtype, "kind", "") in ("b", "i", "u", "f")
                else self.plain(listed)
            )
        if isinstance(value, type):
            return value
        return self.object(value)

    def object(self, value: Any) -> Any:
        if isinstance(value, Record):
            sent = {
                name: getattr(value, name)
                for name in value.__struct_fields__
                if name not in value.NOT_SENT
            }
            return self.entries(sent, value.SENT_AS_NULL)
        if isinstance(value, msgspec.Struct):
            return self.entries({name: getattr(value, name) for name in value.__struct_fields__})
        if dataclasses.is_dataclass(value):
            return self.entries(
                {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            )
        if callable(dump := getattr(value, "model_dump", None)):
            return self.plain(dump())
        return value

    def entries(
        self, mapping: Mapping[Any, Any], sent_as_null: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in mapping.items():
            name = str(key.value if isinstance(key, Enum) else key)
            if value is not None and is_given(value):
                value = self.formatted(name, value)
            if not is_given(value) or (
                value is None and self.drop_none and name not in sent_as_null
            ):
                continue
            alias = self.aliases.get(name, name)
            if alias in made:
                raise ValueError(f"two entries would be sent as {alias!r}, one of them {key!r}")
            made[alias] = value
        return made

    def formatted(self, name: str, value: Any) -> Any:
        form = self.formats.get(name)
        return form(value) if callable(form) else self.plain(value)


def _iso8601(value: dt.date | dt.time) -> str:
    return value.isoformat().replace("+00:00", "Z")
