"""The base of every plain message: an immutable msgspec struct with the methods programs expect of a model.

Bulk data (tokens, tensors) lives in slotted classes around numpy instead; those implement `to_wire` and `from_wire`
and may be fields of records. `to_builtins` and `from_builtins` convert either kind to and from JSON-ready values.
"""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import msgspec

T = TypeVar("T")


@runtime_checkable
class Wired(Protocol):
    """A bulk type that knows its own JSON form."""

    def to_wire(self) -> Any:
        """Return JSON-ready builtins."""

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Build from decoded JSON; raise ValueError naming what is wrong."""


def to_builtins(value: Any, *, keep_none: bool = False) -> Any:
    """JSON-ready form of a value: absent fields (`None`) are left out, as the protocol does."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Record):
        return {
            name: to_builtins(field, keep_none=keep_none)
            for name in value.__struct_fields__
            if (field := getattr(value, name)) is not None or keep_none or name in value.SENT_AS_NULL
        }
    if isinstance(value, Wired):
        return value.to_wire()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: to_builtins(item, keep_none=keep_none) for key, item in value.items()}
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, Iterable):
        return [to_builtins(item, keep_none=keep_none) for item in value]
    raise TypeError(f"cannot put a {type(value).__name__} on the wire")


def _decode_bulk(kind: type[Any], value: Any) -> Any:
    if hasattr(kind, "from_wire"):
        return value if isinstance(value, kind) else kind.from_wire(value)
    raise ValueError(f"cannot read a {kind.__name__} from JSON")


def from_builtins(kind: type[T], value: Any) -> T:
    """Validate decoded JSON into a record or bulk type; errors are `ValueError` and carry the path."""
    if hasattr(kind, "from_wire"):
        return value if isinstance(value, kind) else kind.from_wire(value)  # type: ignore[attr-defined]
    return msgspec.convert(value, kind, dec_hook=_decode_bulk)


def from_json(kind: type[T], body: bytes) -> T:
    """Decode and validate JSON bytes."""
    if hasattr(kind, "from_wire"):
        return kind.from_wire(msgspec.json.decode(body))  # type: ignore[attr-defined,no-any-return]
    return msgspec.json.decode(body, type=kind, dec_hook=_decode_bulk)


def to_json(value: Any) -> bytes:
    """Encode a record, a bulk value or builtins as compact JSON; non-finite floats are refused."""
    return msgspec.json.encode(_finite(to_builtins(value)))


def _finite(value: Any) -> Any:
    """JSON has no NaN; msgspec would silently write null for it."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise ValueError("NaN and Infinity cannot be sent as JSON")
    if isinstance(value, dict):
        for item in value.values():
            _finite(item)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for item in value:
            _finite(item)
    return value


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable message. Unknown keywords are refused; unknown fields of a decoded message are ignored."""

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset()

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The fields as a dictionary; `mode="json"` gives JSON-ready values."""
        if mode == "json":
            dumped: dict[str, Any] = to_builtins(self, keep_none=not exclude_none)
            return dumped
        return {
            name: _dump(value, exclude_none)
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None or not exclude_none
        }

    def model_dump_json(self, *, exclude_none: bool = False, **_: Any) -> str:
        """The fields as a JSON string."""
        return msgspec.json.encode(to_builtins(self, keep_none=not exclude_none)).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, **_: Any) -> Self:
        """A copy, with some fields replaced."""
        return msgspec.structs.replace(self, **dict(update or {}))

    @classmethod
    def model_validate(cls, value: Any, **_: Any) -> Self:
        """Build from a dictionary (or return an instance as it is); `ValueError` names the bad field."""
        return value if isinstance(value, cls) else from_builtins(cls, value)

    @classmethod
    def model_validate_json(cls, text: str | bytes, **_: Any) -> Self:
        """Build from JSON text."""
        return from_json(cls, text.encode() if isinstance(text, str) else text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return pydantic_schema(cls)


def _dump(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Record):
        return value.model_dump(exclude_none=exclude_none)
    if isinstance(value, list | tuple):
        return [_dump(item, exclude_none) for item in value]
    if isinstance(value, dict):
        return {key: _dump(item, exclude_none) for key, item in value.items()}
    return value.model_dump() if hasattr(value, "model_dump") else value


def pydantic_schema(kind: type[Any]) -> Any:
    """Let `kind` be a field of a user's pydantic model (pydantic is imported only by who already uses it)."""
    from pydantic_core import core_schema

    return core_schema.no_info_plain_validator_function(
        lambda value: from_builtins(kind, value),
        serialization=core_schema.plain_serializer_function_ser_schema(lambda v: to_builtins(v, keep_none=True)),
    )
