"""Forms that records share: times with a zone, and messages told apart by a tag."""

from __future__ import annotations

import datetime as dt
import functools
from typing import Any, ClassVar, Self

import msgspec

from tinkex.types.record import Record


class Stamped(Record, frozen=True, kw_only=True):
    """A record with times.

    A time without a zone is read as UTC, since aware and naive times cannot be compared.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, dt.datetime) and value.tzinfo is None:
                msgspec.structs.force_setattr(self, name, value.replace(tzinfo=dt.UTC))


class Variant:
    """Base of a group of records that share a field, told apart by `type` (or another field).

    msgspec's own tags would take `type` away from the fields. A base class that decodes itself
    keeps `type` an ordinary field.
    """

    __slots__ = ()
    TAG: ClassVar[str] = "type"

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form of this record, or of the record of the group that the tag names."""
        if issubclass(cls, Record):
            return msgspec.convert(value, cls, dec_hook=_read_variant)
        subclasses: list[Any] = cls.__subclasses__()
        kinds: dict[Any, type[Any]] = {_tag_of(kind): kind for kind in subclasses}
        named = value.get(cls.TAG) if isinstance(value, dict) else None
        if not isinstance(named, str) or named not in kinds:
            raise ValueError(
                f"{cls.TAG} is {named!r}; expected one of {', '.join(map(str, kinds))}"
            )
        read: Self = kinds[named].from_wire(value)
        return read


def _read_variant(kind: type[Any], value: Any) -> Any:
    return value if isinstance(value, kind) else kind.from_wire(value)


@functools.cache
def _tag_of(kind: type[Any]) -> Any:
    return next(field.default for field in msgspec.structs.fields(kind) if field.name == kind.TAG)
