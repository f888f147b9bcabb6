"""What goes into a model: chunks of tokens or media, model inputs, and the data a loss is computed on."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import numpy as np

from tinkex.types.record import Record, from_builtins, pydantic_schema
from tinkex.types.tensors import Array, TensorData, TensorDtype

MAX_TOKEN = 2**31 - 1
EMPTY = np.zeros(0, dtype=np.int32)


def token_array(tokens: Any) -> Array:
    """Tokens as a flat int32 array; floats, nesting and values outside int32 are refused."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise ValueError("tokens must be a flat list of integers") from None
    if array.size == 0 and array.ndim <= 1:
        return EMPTY
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a flat list of integers, got shape {array.shape} of {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > MAX_TOKEN:
        raise ValueError("token ids must lie between 0 and 2**31 - 1")
    return array.astype(np.int32, copy=False)


class EncodedTextChunk:
    """A run of token ids. `tokens` reads as a list; `tokens_np` is the array behind it."""

    __slots__ = ("tokens_np",)
    type: ClassVar[Literal["encoded_text"]] = "encoded_text"

    def __init__(self, *, tokens: Any, type: str = "encoded_text") -> None:
        if type != "encoded_text":
            raise ValueError(f"EncodedTextChunk.type must be 'encoded_text', got {type!r}")
        self.tokens_np: Array = token_array(tokens)

    @property
    def tokens(self) -> list[int]:
        """The token ids as a list."""
        return cast("list[int]", self.tokens_np.tolist())

    @property
    def length(self) -> int:
        """How many tokens the chunk takes."""
        return int(self.tokens_np.size)

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {"tokens": self.tokens, "type": self.type}

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form."""
        return cls(tokens=value["tokens"])

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The fields as a dictionary."""
        return self.to_wire()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return pydantic_schema(cls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedTextChunk) and np.array_equal(self.tokens_np, other.tokens_np)

    def __hash__(self) -> int:
        return hash(self.tokens_np.tobytes())

    def __repr__(self) -> str:
        return f"EncodedTextChunk(tokens={np.array2string(self.tokens_np, separator=', ', threshold=12)})"

    def __reduce__(self) -> Any:
        return (text_chunk, (self.tokens_np,))


def text_chunk(tokens: Array) -> EncodedTextChunk:
    """A chunk of an int32 array as it is: what comes off the wire is checked against the model it is for."""
    chunk = EncodedTextChunk.__new__(EncodedTextChunk)
    chunk.tokens_np = tokens
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

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        wire = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in wire.items()
            if value is not None
        }


class ImageChunk(_Blob, frozen=True, kw_only=True):
    """An encoded image."""

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        """How many tokens the image takes; known only when `expected_tokens` is given."""
        return _expected(self.expected_tokens, "ImageChunk")


class ImageAssetPointerChunk(_Blob, frozen=True, kw_only=True):
    """An image stored elsewhere."""

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        """How many tokens the image takes; known only when `expected_tokens` is given."""
        return _expected(self.expected_tokens, "ImageAssetPointerChunk")


class DmelChunk(_Blob, frozen=True, kw_only=True):
    """Audio as a discretised mel spectrogram in a tensor container."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The container's first dimension."""
        return _container_rows(self.dmel)


def _expected(tokens: int | None, name: str) -> int:
    if tokens is None:
        raise ValueError(f"{name}.length needs expected_tokens")
    return tokens


def _container_rows(blob: bytes) -> int:
    """First dimension of a tensor container: optional marker 254, dtype byte, varint rank, varint dimensions."""
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
    kind = CHUNKS.get(value.get("type", "encoded_text"))
    if kind is None:
        raise ValueError(f"unknown chunk type {value.get('type')!r}; known are {', '.join(CHUNKS)}")
    if kind is EncodedTextChunk:
        if "tokens" not in value:
            raise ValueError("a text chunk needs tokens")
        return EncodedTextChunk(tokens=value["tokens"])
    fields = dict(value)
    for name in ("data", "dmel"):
        if name in fields:
            fields[name] = _bytes_of(fields[name], name)
    return cast("ModelInputChunk", from_builtins(kind, fields))


class ModelInput:
    """A sequence of chunks; immutable, every change returns a new one.

    Example:
        >>> ModelInput.from_ints([1, 2, 3]).length
        3
    """

    __slots__ = ("chunks",)

    def __init__(self, *, chunks: Sequence[ModelInputChunk | Mapping[str, Any]] = ()) -> None:
        self.chunks: list[ModelInputChunk] = [_chunk(chunk) for chunk in chunks]

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | Array) -> Self:
        """From token ids: a list or an integer array."""
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def empty(cls) -> Self:
        """With nothing in it."""
        return cls()

    def append(self, chunk: ModelInputChunk) -> Self:
        """With a chunk added at the end."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """With one token added at the end."""
        if self.chunks and isinstance(last := self.chunks[-1], EncodedTextChunk):
            joined = np.append(last.tokens_np, token_array([token]))
            return type(self)(chunks=[*self.chunks[:-1], EncodedTextChunk(tokens=joined)])
        return self.append(EncodedTextChunk(tokens=[token]))

    @property
    def length(self) -> int:
        """How many tokens the input takes."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def is_text(self) -> bool:
        """Whether every chunk is text."""
        return all(isinstance(chunk, EncodedTextChunk) for chunk in self.chunks)

    def to_numpy(self) -> Array:
        """All tokens as one int32 array; `ValueError` when a chunk is not text."""
        arrays = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(f"cannot read a chunk of type {chunk.type!r} as tokens")
            arrays.append(chunk.tokens_np)
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else EMPTY

    def to_ints(self) -> list[int]:
        """All tokens as a list; `ValueError` when a chunk is not text."""
        return cast("list[int]", self.to_numpy().tolist())

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {"chunks": [chunk.to_wire() for chunk in self.chunks]}

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form."""
        if not isinstance(value, Mapping) or not isinstance(value.get("chunks"), list):
            raise ValueError("a model input must be an object with a list of chunks")
        return cls(chunks=value["chunks"])

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The fields as a dictionary."""
        return self.to_wire()

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """Build from a dictionary."""
        return value if isinstance(value, cls) else cls.from_wire(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return pydantic_schema(cls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelInput) and self.chunks == other.chunks

    def __hash__(self) -> int:
        return hash(tuple(self.chunks))

    def __repr__(self) -> str:
        return f"ModelInput(chunks={self.chunks!r})"

    def __reduce__(self) -> Any:
        return (_model_input, (self.chunks,))


def _model_input(chunks: list[ModelInputChunk]) -> ModelInput:
    return ModelInput(chunks=chunks)


LossFnInputs: TypeAlias = dict[str, TensorData]
LossFnOutput: TypeAlias = dict[str, TensorData]

INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}


class Datum:
    """One training example: the tokens a model reads and the tensors its loss is computed from.

    Values of `loss_fn_inputs` may be lists, numpy arrays, torch tensors or TensorData.

    Example:
        >>> datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1.0]})
        >>> datum.loss_fn_inputs["target_tokens"].dtype
        'int64'
    """

    __slots__ = ("loss_fn_inputs", "model_input")

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any] | None = None) -> None:
        self.model_input = model_input
        self.loss_fn_inputs: LossFnInputs = {
            name: self._tensor(name, value) for name, value in (loss_fn_inputs or {}).items()
        }

    @staticmethod
    def _tensor(name: str, value: Any) -> TensorData:
        try:
            return TensorData.from_any(value, INPUT_DTYPES.get(name))
        except (TypeError, ValueError) as error:
            raise ValueError(f"loss_fn_inputs[{name!r}]: {error}") from None

    @property
    def nbytes(self) -> int:
        """Size on the wire, as the protocol estimates it for cutting chunks."""
        size = sum(tensor.nbytes for tensor in self.loss_fn_inputs.values())
        for chunk in self.model_input.chunks:
            match chunk:
                case EncodedTextChunk():
                    size += 4 * chunk.length
                case ImageChunk():
                    size += len(chunk.data)
                case DmelChunk():
                    size += len(chunk.dmel)
                case ImageAssetPointerChunk():
                    size += len(chunk.location)
        return size

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it."""
        inputs = {name: tensor.to_wire() for name, tensor in self.loss_fn_inputs.items()}
        return {"model_input": self.model_input.to_wire(), "loss_fn_inputs": inputs}

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Read the JSON form."""
        if not isinstance(value, Mapping) or "model_input" not in value:
            raise ValueError("a datum must be an object with model_input and loss_fn_inputs")
        inputs = value.get("loss_fn_inputs") or {}
        if not isinstance(inputs, Mapping):
            raise ValueError("loss_fn_inputs must be an object")
        tensors = {
            name: TensorData.from_wire(tensor) if isinstance(tensor, Mapping) else tensor
            for name, tensor in inputs.items()
        }
        return cls(ModelInput.model_validate(value["model_input"]), tensors)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The fields as a dictionary."""
        return self.to_wire()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return pydantic_schema(cls)

    def __repr__(self) -> str:
        return f"Datum(model_input={self.model_input!r}, loss_fn_inputs={self.loss_fn_inputs!r})"

    def __reduce__(self) -> Any:
        return (type(self), (self.model_input, self.loss_fn_inputs))
