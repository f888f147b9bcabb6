"""The bases of every message, with the methods programs expect of a model.

A plain message is a `Record`: an immutable msgspec struct. What holds bulk data (tokens, tensors),
keeps fields it does not know, or has several spellings is a `Wired` class instead: it writes and
reads its own JSON, and may be a field of a record. `to_builtins` and `from_builtins` convert either
kind to and from JSON-ready values.
"""

from __future__ import annotations

import base64
import copy
import datetime as dt
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from tinkex.types.suggestions import RecordMeta, WiredMeta, suggestion

T = TypeVar("T")

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number that fits where numbers end up: in names of files, in journals, in a database."""
DEEPEST = 64
"""Deepest nesting of a value that is passed on unchanged."""


def literal_values(kind: Any) -> tuple[Any, ...]:
    """The values that a literal type allows, in their order.

    Args:
        kind: The literal type.

    Returns:
        The values.

    Example:
        >>> from tinkex.types import StopReason
        >>> literal_values(StopReason)
        ('length', 'stop')
    """
    return get_args(kind)


def parse_literal(kind: Any, value: Any) -> Any:
    """A value, if a literal type allows it; else None.

    Args:
        kind: The literal type.
        value: The value.

    Returns:
        The value, or None.

    Example:
        >>> from tinkex.types import TensorDtype
        >>> parse_literal(TensorDtype, "int64"), parse_literal(TensorDtype, "int8")
        ('int64', None)
    """
    return next(
        (known for known in get_args(kind) if type(known) is type(value) and known == value), None
    )


class Message:
    """The methods that records and wired types share."""

    __slots__ = ()

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The fields as a dictionary."""
        raise NotImplementedError

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """The fields as a JSON string; options as for `model_dump`.

        Example:
            >>> SamplingParams(max_tokens=16).model_dump_json(include={"max_tokens", "top_k"})
            '{"max_tokens":16,"top_k":-1}'
        """
        text = msgspec.json.encode(self.model_dump(**{**options, "mode": "json"}))
        return (text if indent is None else msgspec.json.format(text, indent=indent)).decode()

    @classmethod
    def model_validate(cls, value: Any, **_: Any) -> Self:
        """Build from a dictionary, or return an instance unchanged; `ValueError` names the field.

        Example:
            >>> EncodedTextChunk.model_validate({"tokens": [1, 2], "type": "encoded_text"}).length
            2
            >>> AdamParams.model_validate(
            ...     {"learning_rate": 0.001, "weight_decay": 0.1}
            ... ).weight_decay
            0.1
        """
        return value if isinstance(value, cls) else from_builtins(cls, value)

    @classmethod
    def model_validate_json(cls, text: str | bytes, **_: Any) -> Self:
        """Build from JSON text.

        Example:
            >>> SamplingParams.model_validate_json('{"max_tokens": 16}').max_tokens
            16
        """
        return from_json(cls, text.encode() if isinstance(text, str) else text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return pydantic_schema(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "object", "title": cls.__name__}


class Wired(Message, metaclass=WiredMeta):
    """A type with its own JSON form; its constructor takes the names in `FIELDS` as keywords.

    The names of a dataclass are those of its fields.
    """

    __slots__ = ()
    FIELDS: ClassVar[tuple[str, ...]] = ()
    FORM: ClassVar[tuple[str, type[Any], str] | None] = None
    """A field that the JSON form must have, its type, and the error without it."""

    def to_wire(self) -> Any:
        """Return JSON-ready builtins, without what is absent."""
        raise NotImplementedError

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form.

        Args:
            value: Decoded JSON.

        Returns:
            The value.

        Raises:
            ValueError: A field is missing or malformed; the message names it.

        Example:
            >>> EncodedTextChunk.from_wire({"type": "encoded_text", "tokens": [464, 2068]}).tokens
            [464, 2068]
        """
        if cls.FORM is not None:
            field, kind, rule = cls.FORM
            if (
                not isinstance(value, Mapping)
                or field not in value
                or not isinstance(value[field], kind)
            ):
                raise ValueError(rule)
        return cls._read(value)

    @classmethod
    def _read(cls, value: Any) -> Self:
        """Build from the JSON form, which has the type that `FORM` asks for."""
        raise NotImplementedError

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return cls.FIELDS or cls.__match_args__  # type: ignore[attr-defined]

    def _state(self) -> tuple[Any, ...]:
        """The values of the fields, from which the constructor makes an equal value."""
        return tuple(getattr(self, name) for name in self._names())

    def _full(self) -> dict[str, Any]:
        """The fields for a dump: those that are absent too, where that is customary."""
        wire: dict[str, Any] = self.to_wire()
        return wire

    def model_dump(
        self,
        *,
        include: Container[str] | None = None,
        exclude: Container[str] | None = None,
        exclude_none: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """The fields as a dictionary of JSON-ready values, whatever the mode.

        Example:
            >>> ModelInput.from_ints([1, 2]).model_dump()
            {'chunks': [{'tokens': [1, 2], 'type': 'encoded_text'}]}
        """
        fields = self.to_wire() if exclude_none else self._full()
        return {name: value for name, value in fields.items() if _wanted(name, include, exclude)}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with some fields replaced; arrays are shared unless `deep`.

        Example:
            >>> EncodedTextChunk(tokens=[1, 2]).model_copy(update={"tokens": [3]}).tokens
            [3]
        """
        source = copy.deepcopy(self) if deep else self
        fields = dict(zip(self._names(), source._state(), strict=True))
        return type(self)(**fields | dict(update or {}))

    def __eq__(self, other: object) -> bool:  # and no hash: arrays have none
        if not isinstance(other, type(self)):
            return NotImplemented
        return all(map(is_same, self._state(), other._state()))

    def __reduce__(self) -> Any:
        return (type(self), self._state())


def is_same(first: Any, second: Any) -> bool:
    """Return True if two fields are equal: arrays by content, and NaN equals NaN."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        both_real = first.dtype.kind == "f" and second.dtype.kind == "f"
        return np.array_equal(first, second, equal_nan=both_real)
    return type(first) is type(second) and bool(first == second)


class Fixed(Wired):
    """Base of wire types whose fields never change; only `put` sets them, during construction."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} cannot be changed; make a copy with another {name}"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed; {name} stays")


put = object.__setattr__


_PLAIN = frozenset({type(None), str, bool, int, float})
_NESTED = frozenset({float, dict, list})


def to_builtins(value: Any, *, keep_none: bool = False) -> Any:
    """JSON-ready form of a value: absent fields (`None`) are left out, as the protocol does."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Record):
        return _fields(value, keep_none)
    if isinstance(value, Wired):
        return value._full() if keep_none else value.to_wire()
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return float(value)  # numpy's are subclasses that JSON refuses
    if isinstance(value, int):
        return int(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: to_builtins(item, keep_none=keep_none) for key, item in value.items()}
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable):
        return [to_builtins(item, keep_none=keep_none) for item in value]
    raise TypeError(f"cannot put a {type(value).__name__} on the wire")


def _fields(record: Record, keep_none: bool) -> dict[str, Any]:
    """The fields of a record that are sent; most hold plain values, which are taken as they are."""
    sent = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name in record.NOT_SENT or (
            value is None and not keep_none and name not in record.SENT_AS_NULL
        ):
            continue
        if name in record.SENT_WHEN_SET and record.SENT_WHEN_SET[name] == value:
            continue
        sent[name] = value if type(value) in _PLAIN else to_builtins(value, keep_none=keep_none)
    return sent


def _decode_bulk(kind: type[Any], value: Any) -> Any:
    if hasattr(kind, "from_wire"):
        return value if isinstance(value, kind) else kind.from_wire(value)
    raise ValueError(f"cannot read a {kind.__name__} from JSON")


def from_builtins(kind: type[T], value: Any) -> T:
    """Validate decoded JSON into a record or bulk type; a `ValueError` carries the path."""
    if hasattr(kind, "from_wire"):
        return value if isinstance(value, kind) else kind.from_wire(value)  # type: ignore[attr-defined]
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_decode_bulk)


def from_json(kind: type[T], body: bytes) -> T:
    """Decode and validate JSON bytes."""
    if hasattr(kind, "from_wire"):
        return kind.from_wire(msgspec.json.decode(body))  # type: ignore[attr-defined,no-any-return]
    try:
        return msgspec.json.decode(body, type=kind, dec_hook=_decode_bulk)
    except msgspec.ValidationError as error:
        try:
            plain = msgspec.json.decode(body)
        except ValueError:  # what is wrong is wrong of any kind; the first error knows where it is
            raise error from None
        given = _without_nulls(kind, plain)
        if given == plain:
            raise
    return from_builtins(kind, given)


def _without_nulls(kind: Any, value: Any) -> Any:
    """Remove nulls of optional fields from decoded JSON.

    Some clients send null for a field that others leave out.
    """
    if isinstance(value, list):
        inner = next(
            (get_args(one)[0] for one in (kind, *get_args(kind)) if get_origin(one) is list), None
        )
        return [_without_nulls(inner, item) for item in value]
    if not isinstance(value, dict):
        return value
    record = next(
        (
            one
            for one in (kind, *get_args(kind))
            if isinstance(one, type) and issubclass(one, Record)
        ),
        None,
    )
    if record is None:
        return value
    fields = {field.name: field for field in msgspec.structs.fields(record)}
    return {
        name: _without_nulls(fields[name].type if name in fields else None, item)
        for name, item in value.items()
        if item is not None or name not in fields or not _may_lack(fields[name])
    }


def _may_lack(field: msgspec.structs.FieldInfo) -> bool:
    """Return True if null and absence mean the same for a field."""
    return field.default is None or (not field.required and type(None) not in get_args(field.type))


def to_json(value: Any) -> bytes:
    """Encode a record, a bulk value or builtins as compact JSON; non-finite floats are refused."""
    plain = to_builtins(value)
    try:
        return msgspec.json.encode(_finite(plain))
    except ValueError:
        told = _unsendable(plain)
        if told is None:
            raise
        raise ValueError(f"{told}, which cannot be sent as JSON") from None


def _unsendable(value: Any, path: str = "") -> str | None:
    """Name the first number that JSON cannot hold, with the way to it."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{path or 'a number'} is {value}"
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f"{path}.{name}" if path else str(name), item) for name, item in value.items())
    elif isinstance(value, list):
        items = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    return next(
        (told for name, item in items if (told := _unsendable(item, name)) is not None), None
    )


def _finite(value: Any) -> Any:
    """JSON has no NaN; msgspec would silently write null for it."""
    kind = type(value)
    if kind is float:
        if not math.isfinite(value):
            raise ValueError("NaN and Infinity")
    elif kind is dict:
        for item in value.values():
            if type(item) in _NESTED:
                _finite(item)
    elif kind is list and value and type(value[0]) in (dict, list):
        for item in value:
            _finite(item)
    return value


class Record(Message, msgspec.Struct, metaclass=RecordMeta, frozen=True, kw_only=True):
    """An immutable message.

    It refuses unknown keywords, and ignores unknown fields of a decoded message.

    Example:
        >>> params = SamplingParams(max_tokens=16, temperature=0.7)
        >>> params.model_copy(update={"temperature": 0.0}).model_dump(exclude_defaults=True)
        {'max_tokens': 16, 'temperature': 0.0}
    """

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset()
    NOT_SENT: ClassVar[frozenset[str]] = frozenset()
    SENT_WHEN_SET: ClassVar[Mapping[str, Any]] = {}
    """Fields that other servers do not know, and the values at which they are left out."""

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Container[str] | None = None,
        exclude: Container[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
        exclude_unset: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """The fields as a dictionary.

        Args:
            mode: "json" gives JSON-ready values, "python" keeps times, enumerations and bytes.
            include: Names of the fields to keep; all by default.
            exclude: Names of the fields to leave out.
            exclude_none: Leave out what is absent.
            exclude_defaults: Leave out fields that hold their default.
            exclude_unset: The same: a record does not remember which fields were given.

        Example:
            >>> SamplingParams(max_tokens=16, stop=["END"]).model_dump(exclude_defaults=True)
            {'max_tokens': 16, 'stop': ['END']}
        """
        usual = _defaults(type(self)) if exclude_defaults or exclude_unset else {}
        dumped = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            skipped = (exclude_none and value is None) or name in self.NOT_SENT
            skipped = skipped or (name in self.SENT_WHEN_SET and self.SENT_WHEN_SET[name] == value)
            if (
                not skipped
                and not (name in usual and usual[name] == value)
                and _wanted(name, include, exclude)
            ):
                dumped[name] = self._dump_field(value, mode, exclude_none)
        return dumped

    def _dump_field(self, value: Any, mode: str, exclude_none: bool) -> Any:
        return (
            to_builtins(value, keep_none=not exclude_none)
            if mode == "json"
            else _dump(value, exclude_none)
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with some fields replaced.

        Example:
            >>> AdamParams(learning_rate=1e-3).model_copy(
            ...     update={"learning_rate": 1e-4}
            ... ).learning_rate
            0.0001
        """
        for name in update or ():
            if name not in self.__struct_fields__:
                raise TypeError(suggestion(type(self).__name__, name, self.__struct_fields__))
        return msgspec.structs.replace(copy.deepcopy(self) if deep else self, **dict(update or {}))


def _wanted(name: str, include: Container[str] | None, exclude: Container[str] | None) -> bool:
    return (include is None or name in include) and (exclude is None or name not in exclude)


def _defaults(kind: type[Record]) -> dict[str, Any]:
    """The fields of a record that have a default, and that default."""
    found = {}
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            found[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            found[field.name] = field.default_factory()
    return found


def settle(record: Record, name: str, value: Any) -> None:
    """Replace a field while a record is being made; afterwards it never changes."""
    msgspec.structs.force_setattr(record, name, value)


def settle_each(
    record: Record,
    read: Callable[[Any, str], Any],
    names: Iterable[str],
    optional: Iterable[str] = (),
) -> None:
    """Replace fields by what `read` makes of them; optional ones may be None."""
    for name in names:
        value = getattr(record, name)
        if (found := read(value, name)) is not value:
            settle(record, name, found)
    for name in optional:
        value = getattr(record, name)
        if value is not None and (found := read(value, name)) is not value:
            settle(record, name, found)


def number(value: Any, name: str) -> float:
    """A real number of any kind as a float; `ValueError` names the field otherwise."""
    if type(value) is float:
        return value
    if isinstance(value, str | bytes | bool) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be a number, got {type(value).__name__}")
    return float(value)


def whole(value: Any, name: str) -> int:
    """An integer of any kind, 8.0 among them, as an int; `ValueError` names the field otherwise."""
    if type(value) is int:
        found = value
    elif isinstance(value, float) and value.is_integer():
        found = int(value)
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {type(value).__name__}")
    else:
        found = int(value)
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{name} must fit in 64 bits, got a number of {found.bit_length()} bits")
    return found


def check_depth(value: Any, name: str) -> None:
    """Refuse a value that is nested deeper than anyone can mean: others walk it by recursion."""
    level = [value]
    for _ in range(DEEPEST + 1):
        held = [
            one.values() if isinstance(one, Mapping) else one
            for one in level
            if isinstance(one, Mapping | list)
        ]
        level = [item for items in held for item in items]
        if not level:
            return
    raise ValueError(f"{name} is nested more than {DEEPEST} deep")


def _dump(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Record):
        return value.model_dump(exclude_none=exclude_none)
    if isinstance(value, list | tuple):
        return [_dump(item, exclude_none) for item in value]
    if isinstance(value, dict):
        return {key: _dump(item, exclude_none) for key, item in value.items()}
    return value.model_dump() if hasattr(value, "model_dump") else value


def pydantic_schema(kind: type[Any]) -> Any:
    """Let `kind` be a field of a user's pydantic model, without importing pydantic here."""
    from pydantic_core import core_schema

    return core_schema.no_info_plain_validator_function(
        lambda value: from_builtins(kind, value),
        serialization=core_schema.plain_serializer_function_ser_schema(
            lambda v: to_builtins(v, keep_none=True)
        ),
    )
