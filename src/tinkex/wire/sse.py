"""Server-sent events: bytes in as they come off the wire, whole events out.

The reader keeps to the WHATWG standard: lines end at CR LF, LF or CR; a blank line ends an event;
comments and unknown fields mean nothing; one blank after the colon belongs to the syntax and any
further one to the value. An event without a data line is none, so a block of comments, sent to keep
a connection open, is silent.

It differs from the standard in two points. `id` is the event's own and is not carried over to the
ones after it. And a stream that ends right after a whole line, without the blank line that should
follow, has its last event delivered all the same (servers forget it); one that ends within a line
was cut off, and what it left unfinished is dropped.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tinkex.types.record import Record

EVENT_LIMIT = 16 * 2**20
"""Most bytes of one event by default."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CARRIAGE_RETURN, _LINE_FEED = b"\r\n"
_LEADING_NUMBER = re.compile(rb"[0-9]+")
_LONGEST_NUMBER = 18


class ServerSentEvent(Record, frozen=True, kw_only=False):
    """One event of a stream; `event`, `id` and `retry` are None if the block lacks them."""

    event: str | None = None
    data: str = ""
    id: str | None = None
    retry: int | None = None

    def json(self) -> Any:
        """The data decoded, or the text itself where it is not JSON.

        Example:
            >>> (
            ...     ServerSentEvent(data='{"token": "Hi"}').json(),
            ...     ServerSentEvent(data="[DONE]").json(),
            ... )
            ({'token': 'Hi'}, '[DONE]')
        """
        try:
            return msgspec.json.decode(self.data)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return self.data


class Decoder:
    r"""Takes a stream in pieces, cut anywhere, and gives the events that each piece completes.

    No more than `limit` bytes are kept for an event that is not complete. A line that goes over it
    ends the decoder: events before that line are still delivered, then every call raises
    `ValueError`.

    Example:
        >>> decoder = Decoder()
        >>> decoder.feed(b"data: a")
        []
        >>> [event.data for event in decoder.feed(b"b\n\ndata: c\n\n")]
        ['ab', 'c']
    """

    _name: bytearray | None
    _data: bytearray | None
    _id: bytearray | None
    _retry: int | None

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._overrun = False
        self._begun = False
        # the last piece ended in CR: an LF that starts the next one belongs to it
        self._after_return = False
        self._rest = bytearray()  # a line that has not ended
        self._forget()

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Read on; `ValueError` when an event grows beyond the limit."""
        if self._overrun:
            raise self._too_long()
        if chunk and self._after_return:
            self._after_return = False
            if chunk[0] == _LINE_FEED:
                chunk = chunk[1:]
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        events: list[ServerSentEvent] = []
        if end:
            self._after_return = end == len(chunk) and chunk[-1] == _CARRIAGE_RETURN
            lines = (self._rest + chunk[:end]).splitlines()
            self._rest = bytearray(chunk[end:])
            self._read(lines, events)
        else:
            self._rest += chunk
        self._overrun = self._overrun or self._exceeds(self._rest)
        if self._overrun:
            self._rest.clear()
            self._forget()
            if not events:
                raise self._too_long()
        return events

    def close(self) -> list[ServerSentEvent]:
        """End the stream; return the last event if only its blank line is missing."""
        if self._overrun:
            raise self._too_long()
        last = None if self._rest else self._event()
        self._rest.clear()
        self._forget()
        return [] if last is None else [last]

    def _read(self, lines: list[bytearray], events: list[ServerSentEvent]) -> None:
        for line in lines:
            if self._exceeds(line):
                self._overrun = True
                return
            if not self._begun:
                self._begun = True
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line:
                if (event := self._event()) is not None:
                    events.append(event)
                self._forget()
                continue
            name, _, value = line.partition(b":")
            # comments may go on for ever: they keep a connection open, and nothing is kept of them
            if name:
                self._size += len(line) + 1
            if value.startswith(b" "):
                del value[0]
            if name == b"data":
                if self._data is None:
                    self._data = value
                else:
                    self._data += b"\n"
                    self._data += value
            elif name == b"event":
                self._name = value
            elif name == b"id":
                if b"\0" not in value:  # the standard has such an id ignored
                    self._id = value
            elif name == b"retry":
                self._retry = _leading_number(value)

    def _exceeds(self, line: bytearray) -> bool:
        # a blank line ends the event: it adds nothing
        return len(line) > 0 and self._size + len(line) > self._limit

    def _event(self) -> ServerSentEvent | None:
        if self._data is None:
            return None
        return ServerSentEvent(
            _text(self._name) if self._name else None,
            _text(self._data),
            None if self._id is None else _text(self._id),
            self._retry,
        )

    def _forget(self) -> None:
        self._size = 0
        self._name = self._data = self._id = None
        self._retry = None

    def _too_long(self) -> ValueError:
        return ValueError(f"the stream holds an event of more than {self._limit} bytes, the limit")


async def events(
    chunks: AsyncIterator[bytes], limit: int = EVENT_LIMIT
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of a stream as they complete; close the source if the reader stops early."""
    decoder = Decoder(limit)
    try:
        async for chunk in chunks:
            for event in decoder.feed(chunk):
                yield event
        for event in decoder.close():
            yield event
    finally:
        if (close := getattr(chunks, "aclose", None)) is not None:
            await close()


def _text(value: bytearray) -> str:
    return value.decode("utf-8", "replace")


def _leading_number(value: bytearray) -> int | None:
    found = _LEADING_NUMBER.match(value)
    return int(found[0]) if found is not None and len(found[0]) <= _LONGEST_NUMBER else None
