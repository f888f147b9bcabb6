"""Bodies: which form a message takes (JSON or protobuf, plain or zstd), and reading it back.

Both sides of the wire use this module, so a message cannot be written one way and read another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from tinkex.types.future_requests import FuturesRetrieveResponse
from tinkex.types.record import from_json, to_json
from tinkex.types.sampled import SampleResponse
from tinkex.types.training import ForwardBackwardOutput, ForwardBackwardRequest
from tinkex.wire import protobuf_passes, protobuf_samples, protobuf_schema
from tinkex.wire.pieces import Pieces

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

T = TypeVar("T")

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
BATCH = "application/x-tinkex-batch"
"""The answer to a batched poll with results in it: see `encode_batch`."""
EVENT_STREAM = "text/event-stream"
PIECE_BYTES = 1 << 16
MAX_BODY = 1 << 30
"""Most bytes a compressed body may grow to, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class Body:
    """Encoded bytes and the headers that say what they are."""

    source: bytes | Pieces
    content_type: str = JSON
    encoding: str | None = None

    @property
    def data(self) -> bytes:
        """The bytes, in one."""
        return self.source if isinstance(self.source, bytes) else bytes(self.source)

    @property
    def headers(self) -> dict[str, str]:
        """Content headers."""
        headers = {"Content-Type": self.content_type}
        return headers | {"Content-Encoding": self.encoding} if self.encoding else headers


ENCODERS: dict[type[Any], Callable[[Any], bytes | Pieces]] = {
    ForwardBackwardRequest: protobuf_passes.encode_forward_backward,
    ForwardBackwardOutput: protobuf_passes.encode_forward_backward_output,
    SampleResponse: protobuf_samples.encode_sample,
}
DECODERS: dict[type[Any], Callable[[bytes], Any]] = {
    ForwardBackwardRequest: protobuf_passes.decode_forward_backward,
    ForwardBackwardOutput: protobuf_passes.decode_forward_backward_output,
    SampleResponse: protobuf_samples.decode_sample,
}


def has_protobuf(kind: type[Any]) -> bool:
    """Return True if a message has a protobuf form."""
    return kind in DECODERS


def encode(value: Any, *, as_protobuf: bool = True, compress: bool = False) -> Body:
    """Encode a message: as protobuf when it has such a form and that is wanted, else as JSON."""
    encoder = ENCODERS.get(type(value)) if as_protobuf else None
    data = encoder(value) if encoder else to_json(value)
    content_type = PROTOBUF if encoder else JSON
    if compress:
        return Body(zstd.compress(bytes(data), 1), content_type, "zstd")
    return Body(data, content_type)


def loads(data: bytes) -> Any:
    """Decode JSON whatever it says; `ValueError` when it is none, or nested too deeply."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from None
    except RecursionError:
        raise ValueError("malformed JSON: it is nested too deeply") from None


def decode(kind: type[T], data: bytes, content_type: str = JSON) -> T:
    """Decode and validate a message; `ValueError` says what is wrong with it."""
    if PROTOBUF in content_type:
        decoder = DECODERS.get(kind)
        if decoder is None:
            raise ValueError(f"{kind.__name__} has no protobuf form")
        return cast("T", decoder(data))
    try:
        return from_json(kind, data)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from None
    except RecursionError:
        raise ValueError("malformed JSON: it is nested too deeply") from None
    except (
        AttributeError,
        KeyError,
        OverflowError,
        TypeError,
    ) as error:  # from the types that read their own JSON
        raise ValueError(f"malformed {kind.__name__}: {error!r}") from None


def encode_batch(head: FuturesRetrieveResponse, payloads: Sequence[bytes]) -> Body:
    """Encode a batched answer with results: length of the JSON head, the head, the results.

    Each completion of the head says how many bytes its result has (`inline_size`) and of which
    `content_type` they are; those without an `inline_size` brought none. A failed operation's
    result is its `RequestFailedResponse`.
    """
    text = to_json(head)
    return Body(b"".join((len(text).to_bytes(4, "little"), text, *payloads)), BATCH)


def decode_batch(data: bytes) -> tuple[FuturesRetrieveResponse, dict[str, tuple[str, bytes]]]:
    """Return the head of a batched answer, and the content type and bytes of each result in it."""
    size = int.from_bytes(data[:4], "little")
    head = decode(FuturesRetrieveResponse, data[4 : 4 + size])
    payloads, start = {}, 4 + size
    for completion in head.completions:
        if completion.inline_size is not None:
            end = start + completion.inline_size
            if end > len(data):
                raise ValueError("malformed batch: it is cut short")
            payloads[completion.request_id] = (completion.content_type or JSON, data[start:end])
            start = end
    return head, payloads


def peek(data: bytes, content_type: str) -> tuple[str, int] | None:
    """The model and number of a request that could not be decoded, if they can be made out."""
    try:
        if PROTOBUF in content_type:
            wire = protobuf_schema.parse("ForwardBackwardRequest", data)
            model_id, seq_id = wire.model_id, wire.seq_id
        else:
            wire = msgspec.json.decode(data)
            model_id, seq_id = wire["model_id"], wire["seq_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # A number that no request can have is nobody's, and not spent.
    is_number = type(seq_id) is int and 0 < seq_id < 1 << 63
    return (model_id, seq_id) if isinstance(model_id, str) and is_number else None


class TooLarge(ValueError):
    """A compressed body that would grow beyond what is allowed."""


def expanded_size(data: bytes, encoding: str | None) -> int | None:
    """The size a body says it has without its Content-Encoding; None if it does not say."""
    if not encoding or encoding == "identity":
        return len(data)
    try:
        return zstd.get_frame_info(data).decompressed_size
    except zstd.ZstdError:
        return 0  # decompressing it fails at once


def _measure(data: bytes, limit: int) -> int:
    """Count the bytes of a body that does not say how large it is, up to the limit.

    It goes by pieces that are dropped: joining one large result would hold up all other threads.
    """
    decompressor = zstd.ZstdDecompressor()
    size = len(decompressor.decompress(data, max_length=PIECE_BYTES))
    while size <= limit and not decompressor.eof and not decompressor.needs_input:
        size += len(decompressor.decompress(b"", max_length=PIECE_BYTES))
    if size > limit:
        raise TooLarge(f"the body takes more than {limit} bytes decompressed")
    return size


def decompress(data: bytes, encoding: str | None, limit: int = MAX_BODY) -> bytes:
    """Undo a Content-Encoding; the size is checked before memory is taken for it."""
    if not encoding or encoding == "identity":
        return data
    if encoding != "zstd":
        raise ValueError(f"content encoding {encoding!r} is not supported; use zstd or none")
    try:
        size = zstd.get_frame_info(data).decompressed_size
        if size is None:
            size = _measure(data, limit)
        elif size > limit:
            raise TooLarge(f"the body would take {size} bytes decompressed; the limit is {limit}")
        decompressor = zstd.ZstdDecompressor()
        plain = decompressor.decompress(data, max_length=size + 1)
    except zstd.ZstdError as error:
        raise ValueError(f"malformed zstd body: {error}") from None
    if len(plain) > size:
        raise TooLarge(f"the body takes more than the {size} bytes that its frame names")
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("malformed zstd body: it is truncated, or more than one frame")
    return plain
