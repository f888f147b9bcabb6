"""Request bodies: JSON, or multipart forms with files.

A file is its content, or a tuple `(file name or None, content[, content type or None[, headers]])`.
Content is bytes, a list of bytes, a file opened in binary mode, a path, or text. Text is a path if
there is such a file, if it has a slash or a backslash, or if it starts with `.` or `~`; else it is
the content itself. Give bytes to be sure.

Content that cannot be sent raises a `ValueError` or `TypeError` that starts with "Failed to prepare
request".
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeAlias

from tinkex.types.record import to_json
from tinkex.wire.json_values import transform

FileContent: TypeAlias = (
    bytes | bytearray | memoryview | str | os.PathLike[str] | IO[bytes] | list[bytes]
)
Headers: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
File: TypeAlias = (
    FileContent
    | tuple[str | None, FileContent]
    | tuple[str | None, FileContent, str | None]
    | tuple[str | None, FileContent, str | None, Headers]
)
Files: TypeAlias = Mapping[str, File] | Sequence[tuple[str, File]]

JSON = "application/json"
FORM = "multipart/form-data"
BINARY = "application/octet-stream"

_FIELD_OF_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# RFC 2046, section 5.1.1
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_GIVEN_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]*)"|([^;\s]*))', re.IGNORECASE)
_TOKEN = re.compile(r"[0-9A-Za-z'+_.-]+")


@contextlib.contextmanager
def _preparing() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        raise TypeError(f"Failed to prepare request: {error}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"Failed to prepare request: {error}") from error


@_preparing()
def multipart(fields: Any, files: Files | None, boundary: str | None = None) -> tuple[str, bytes]:
    """Return the content type and the bytes of a form: first its fields, then its files.

    Args:
        fields: A mapping or an object, transformed like a JSON body. Nested values get names with
            brackets: `a[b]` for the entries of a mapping, `a[]` for each item of a list. None is
            sent as empty text.
        files: Files by name, or pairs of name and file if a name occurs more than once.
        boundary: Separates the parts; `ValueError` if it occurs in one of them. By default 16
            random bytes in hex.

    Example:
        >>> content_type, body = multipart({"user": {"name": "Ada"}}, {}, boundary="B")
        >>> content_type
        'multipart/form-data; boundary=B'
        >>> body.splitlines()[:2]
        [b'--B', b'Content-Disposition: form-data; name="user[name]"']
    """
    return _multipart(fields, files, boundary)


@_preparing()
def body_for(
    body: Any,
    files: Files | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    drop_none: bool = False,
) -> tuple[str | None, bytes]:
    """Return the content type and the bytes of a body; no type if there is nothing to send.

    The body is a form if there are files, or if the headers' content type is multipart/form-data;
    a boundary in it is used. Else it is JSON. Text and bytes are sent as they are.
    """
    given = next(
        (value for name, value in (headers or {}).items() if name.lower() == "content-type"), None
    )
    wants_form = given is not None and given.partition(";")[0].strip().lower() == FORM
    if files or wants_form:
        found = _GIVEN_BOUNDARY.search(given) if wants_form and given else None
        return _multipart(
            body, files, (found[1] if found[2] is None else found[2]) if found else None, drop_none
        )
    if isinstance(body, str | bytes):
        return given or JSON, body.encode() if isinstance(body, str) else body
    data = transform(body, drop_none=drop_none)
    return (None, b"") if data is None else (given or JSON, to_json(data))


def _multipart(
    fields: Any, files: Files | None, boundary: str | None, drop_none: bool = False
) -> tuple[str, bytes]:
    flat = transform(fields, drop_none=drop_none)
    if flat is not None and not isinstance(flat, dict):
        raise TypeError(f"the fields of a form must be a mapping, got {type(fields).__name__}")
    parts = [(_disposition(name), value) for name, value in _flattened(flat or {})]
    parts += [_file_part(name, file) for name, file in _pairs(files)]
    if boundary is None:
        boundary = secrets.token_hex(16)
    elif not _BOUNDARY.fullmatch(boundary):
        raise ValueError(
            f"{boundary!r} cannot be a boundary: it takes 1 to 70 letters, digits or '()+_,-./:=?"
        )
    elif any(f"--{boundary}".encode() in text for part in parts for text in part):
        raise ValueError(f"the boundary {boundary!r} occurs in what it should separate")
    pieces = []
    for head, content in parts:
        pieces += [b"--", boundary.encode(), b"\r\n", head, b"\r\n\r\n", content, b"\r\n"]
    pieces += [b"--", boundary.encode(), b"--\r\n"]
    shown = boundary if _TOKEN.fullmatch(boundary) else f'"{boundary}"'
    return f"{FORM}; boundary={shown}", b"".join(pieces)


def _flattened(value: Any, name: str = "") -> Iterator[tuple[str, bytes]]:
    """Leaves with their bracketed names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flattened(item, f"{name}[{key}]" if name else key)
    elif isinstance(value, list):
        for item in value:
            yield from _flattened(item, f"{name}[]")
    elif isinstance(value, bytes):
        yield name, value
    elif value is None or isinstance(value, str):
        yield name, (value or "").encode()
    elif isinstance(value, bool):
        yield name, b"true" if value else b"false"
    elif isinstance(value, int | float):
        yield name, str(value).encode()
    else:
        raise TypeError(f"the field {name!r} is a {type(value).__name__}, which a form cannot hold")


def _pairs(files: Any) -> Iterable[tuple[str, Any]]:
    if not files:
        return []
    if isinstance(files, Mapping):
        return [(str(name), file) for name, file in files.items()]
    if not isinstance(files, list | tuple):
        raise TypeError(
            f"files must be a mapping or a list of (name, file) pairs, got {type(files).__name__}"
        )
    for pair in files:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError("a list of files must hold pairs of a name and a file")
    return [(name, file) for name, file in files]


def _file_part(name: str, file: Any) -> tuple[bytes, bytes]:
    content_type: str | None = None
    extra: Any = None
    if isinstance(file, tuple):
        if not 2 <= len(file) <= 4 or not all(
            item is None or isinstance(item, str) for item in (file[0], *file[2:3])
        ):
            raise TypeError(
                f"the file {name!r} must be (file name, content[, content type[, headers]])"
            )
        filename, source, content_type, extra = [*file, None, None][:4]
        content, _ = _content(name, source)
    else:
        content, filename = _content(name, file)
    headers = list(extra.items() if isinstance(extra, Mapping) else extra or ())
    lines = [_disposition(name, filename)]
    if content_type is not None or not any(key.lower() == "content-type" for key, _ in headers):
        headers = [(key, value) for key, value in headers if key.lower() != "content-type"]
        headers.insert(0, ("Content-Type", content_type or BINARY))
    lines += [_header(key, value) for key, value in headers]
    return b"\r\n".join(lines), content


def _content(name: str, source: Any) -> tuple[bytes, str | None]:
    """The bytes, and the file name they bring along."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), None
    if isinstance(source, str) and not _is_path(source):
        return source.encode(), None
    if isinstance(source, str | os.PathLike):
        path = os.fsdecode(source)
        return _read(name, path), os.path.basename(path)
    if isinstance(source, list) and all(isinstance(piece, bytes) for piece in source):
        return b"".join(source), None
    if not callable(getattr(source, "read", None)):
        raise TypeError(f"the file {name!r} cannot be made of a {type(source).__name__}")
    content, origin = source.read(), getattr(source, "name", None)
    if not isinstance(content, bytes | bytearray):
        raise TypeError(f"the file {name!r} must be opened in binary mode")
    return bytes(content), os.path.basename(origin) if isinstance(origin, str) else None


def _is_path(text: str) -> bool:
    return "/" in text or "\\" in text or text.startswith((".", "~")) or os.path.exists(text)


def _read(name: str, path: str) -> bytes:
    shown = path if len(path) <= 200 else f"{path[:200]}…"
    place = os.path.expanduser(path)
    if os.path.isdir(place):
        raise ValueError(f"the file {name!r} is a directory: {shown}")
    try:
        with open(place, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {shown} to send as {name!r}; text is sent itself if given as bytes"
        ) from None
    except (OSError, ValueError) as error:
        # without the path again, which may be long
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(f"the file {name!r} cannot be read from {shown}: {why}") from error


def _disposition(name: str, filename: str | None = None) -> bytes:
    line = f'Content-Disposition: form-data; name="{_quoted(name)}"'
    return (line if filename is None else f'{line}; filename="{_quoted(filename)}"').encode()


def _quoted(name: str) -> str:
    """A name for between quotes.

    Browsers write a quote as %22 and leave backslashes, to which some servers give a meaning of
    their own; with both of them percent-encoded every reader sees the name end in the same place.
    """
    if _CONTROL.search(name):
        raise ValueError(f"the name {name!r} has control characters")
    return name.replace('"', "%22").replace("\\", "%5C")


def _header(name: str, value: str) -> bytes:
    if not _FIELD_OF_HEADER.fullmatch(name) or name.lower() == "content-disposition":
        raise ValueError(f"a file cannot have the header {name!r}")
    if _CONTROL.search(value):
        raise ValueError(f"the header {name} has control characters: {value!r}")
    return f"{name}: {value}".encode()
