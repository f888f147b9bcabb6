"""Pieces of an input: text, images and audio."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, cast

import numpy as np

from tinkex.types.record import Fixed, Int64, Record, from_builtins, put, settle
from tinkex.types.tensors import Array, packed_list

MAX_TOKEN = 2**31 - 1


EMPTY = np.zeros(0, dtype=np.int32)


def token_array(tokens: Any) -> Array:
    """Tokens as a flat int32 array; floats, nesting and values outside int32 are refused."""
    array = packed_list(tokens, "i", np.int32) if type(tokens) is list else None
    try:
        array = np.asarray(tokens) if array is None else array
    except ValueError:
        raise ValueError("tokens must be a flat list of integers") from None
    if array.size == 0 and array.ndim <= 1:
        return EMPTY
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"tokens must be a flat list of integers, got shape {array.shape} of {array.dtype}"
        )
    if int(array.min()) < 0 or int(array.max()) > MAX_TOKEN:
        raise ValueError("token ids must lie between 0 and 2**31 - 1")
    return array.astype(np.int32, copy=False)


class EncodedTextChunk(Fixed):
    """A run of token ids. `tokens` reads as a list; `tokens_np` is the array behind it.

    Example:
        >>> chunk = EncodedTextChunk(tokens=[464, 2068, 7586])
        >>> chunk.tokens, chunk.length
        ([464, 2068, 7586], 3)
    """

    __slots__ = ("length", "tokens_np")
    FIELDS = ("tokens",)
    FORM = ("tokens", object, "a text chunk must be an object with tokens")
    type: ClassVar[Literal["encoded_text"]] = "encoded_text"

    tokens_np: Array
    length: int
    """Number of tokens in the chunk."""

    def __init__(self, *, tokens: Any, type: str = "encoded_text") -> None:
        if type != "encoded_text":
            raise ValueError(f"EncodedTextChunk.type must be 'encoded_text', got {type!r}")
        array = token_array(tokens)
        put(self, "tokens_np", array)
        put(self, "length", array.size)

    @property
    def tokens(self) -> list[int]:
        """The token ids as a list."""
        return cast("list[int]", self.tokens_np.tolist())

    def to_wire(self) -> dict[str, Any]:
        """JSON form.

        Example:
            >>> EncodedTextChunk(tokens=[464, 2068]).to_wire()
            {'tokens': [464, 2068], 'type': 'encoded_text'}
        """
        return {"tokens": self.tokens, "type": self.type}

    @classmethod
    def _read(cls, value: Any) -> Self:
        return cls(tokens=value["tokens"], type=value.get("type", "encoded_text"))

    def _state(self) -> tuple[Any, ...]:
        return (self.tokens_np,)

    def __hash__(self) -> int:
        return hash(self.tokens_np.tobytes())

    def __repr__(self) -> str:
        tokens = np.array2string(self.tokens_np, separator=", ", threshold=12)
        return f"EncodedTextChunk(tokens={tokens})"

    def __reduce__(self) -> Any:
        return (text_chunk, (self.tokens_np,))


def text_chunk(tokens: Array) -> EncodedTextChunk:
    """Wrap an int32 array as a chunk without checking it.

    The server checks tokens from the wire against the model.
    """
    chunk = EncodedTextChunk.__new__(EncodedTextChunk)
    put(chunk, "tokens_np", tokens)
    put(chunk, "length", tokens.size)
    return chunk


def _bytes_of(value: Any, name: str) -> bytes:
    """Raw bytes, or bytes written as base64 text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError(f"{name} must be bytes or base64 text") from None


class _Blob(Record, frozen=True, kw_only=True):
    """A chunk that takes a number of tokens only the server knows for certain."""

    def __post_init__(self) -> None:
        for name in ("data", "dmel"):
            if not isinstance(value := getattr(self, name, b""), bytes):
                settle(self, name, _bytes_of(value, name))

    def _dump_field(self, value: Any, mode: str, exclude_none: bool) -> Any:
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value

    def to_wire(self) -> dict[str, Any]:
        """JSON form; bytes are written in base64.

        Example:
            >>> ImageChunk(data=b"png", format="png").to_wire()
            {'data': 'cG5n', 'format': 'png', 'type': 'image'}
        """
        wire = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in wire.items()
            if value is not None
        }


class _Image(_Blob, frozen=True, kw_only=True):
    if TYPE_CHECKING:  # each kind of image has the field at its own place on the wire
        expected_tokens: Int64 | None

    @property
    def length(self) -> int:
        """Number of tokens the image takes; needs `expected_tokens`."""
        if self.expected_tokens is None:
            raise ValueError(f"{type(self).__name__}.length needs expected_tokens")
        return self.expected_tokens


class ImageChunk(_Image, frozen=True, kw_only=True):
    """An encoded image.

    Example:
        >>> image = ImageChunk(
        ...     data=b"...", format="png", expected_tokens=64
        ... )  # data=Path("page.png").read_bytes()
        >>> ModelInput(chunks=[image, EncodedTextChunk(tokens=[464, 2068])]).length
        66
    """

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: Int64 | None = None
    type: Literal["image"] = "image"


class ImageAssetPointerChunk(_Image, frozen=True, kw_only=True):
    """An image stored elsewhere.

    Example:
        >>> image = ImageAssetPointerChunk(
        ...     location="s3://images/page.png", format="png", expected_tokens=64
        ... )
        >>> ModelInput(chunks=[image, EncodedTextChunk(tokens=[464, 2068])]).length
        66
    """

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: Int64 | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"


class DmelChunk(_Blob, frozen=True, kw_only=True):
    """Audio as a discretised mel spectrogram in a tensor container.

    Example:
        >>> container = bytes(
        ...     [0, 2, 50, 80]
        ... )  # a dtype, two dimensions: 50 frames of 80 bands, then the values
        >>> DmelChunk(dmel=container).length
        50
    """

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The container's first dimension."""
        return _container_rows(self.dmel)


def _container_rows(blob: bytes) -> int:
    """Return the first dimension of a tensor container.

    The layout is: optional marker 254, dtype byte, varint rank, varint dimensions.
    """
    position = 1 if blob[:1] == b"\xfe" else 0
    position += 1
    rank, position = _varint(blob, position)
    if rank < 1:
        raise ValueError("the audio tensor has no dimensions")
    return _varint(blob, position)[0]


def _varint(blob: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(blob) and shift < 64:
        byte = blob[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("the audio tensor header is truncated")


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk
"""A piece of what a model reads."""


CHUNKS: dict[str, type[Any]] = {
    "encoded_text": EncodedTextChunk,
    "image": ImageChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "dmel": DmelChunk,
}


def _chunk(value: Any) -> ModelInputChunk:
    if isinstance(value, EncodedTextChunk | _Blob):
        return cast("ModelInputChunk", value)
    if not isinstance(value, Mapping):
        raise ValueError(f"a chunk must be an object, got {type(value).__name__}")
    named = value.get("type", "encoded_text")
    kind = CHUNKS.get(named) if isinstance(named, str) else None
    if kind is None:
        raise ValueError(f"unknown chunk type {named!r}; known are {', '.join(CHUNKS)}")
    if kind is EncodedTextChunk:
        if "tokens" not in value:
            raise ValueError("a text chunk needs tokens")
        return EncodedTextChunk(tokens=value["tokens"])
    fields = dict(value)
    for name in ("data", "dmel"):
        if name in fields:
            fields[name] = _bytes_of(fields[name], name)
    return cast("ModelInputChunk", from_builtins(kind, fields))


def chunk_at(index: int, value: Any) -> ModelInputChunk:
    """Return a value as a chunk; errors name its index."""
    try:
        return _chunk(value)
    except ValueError as error:
        raise ValueError(f"chunks[{index}]: {error}") from None
