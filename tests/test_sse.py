"""Server-sent events: what is an event, cuts at any place, streams that want to fill the memory."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import example, given, strategies as st

from tinkex.wire.sse import Decoder, ServerSentEvent, events


def decoded(*chunks: bytes, limit: int = 2**20) -> list[ServerSentEvent]:
    """All events of a stream that comes in these pieces, its end included."""
    decoder = Decoder(limit)
    found = [event for chunk in chunks for event in decoder.feed(chunk)]
    return found + decoder.close()


def reference(stream: bytes) -> list[ServerSentEvent]:
    """The same read the plain way: the whole text at once, line by line, with nothing but the
    rules."""
    *lines, rest = re.split("\r\n|\n|\r", stream.decode("utf-8-sig", "replace"))
    if not rest:
        lines.append("")  # the end stands for a blank line that was forgotten
    found, block = [], list[tuple[str, str]]()
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            block.append((name, value[1:] if value[:1] == " " else value))
            continue
        fields = dict(block)
        data = [value for name, value in block if name == "data"]
        retries = [value for name, value in block if name == "retry"]
        ids = [value for name, value in block if name == "id" and "\0" not in value]
        if data:
            number = re.match("[0-9]+", retries[-1]) if retries else None
            found.append(
                ServerSentEvent(
                    event=fields.get("event") or None,
                    data="\n".join(data),
                    id=ids[-1] if ids else None,
                    retry=int(number[0]) if number else None,
                )
            )
        block = []
    return found


PIECES = [
    b"data",
    b"event",
    b"id",
    b"retry",
    b"other",
    b":",
    b" ",
    b"\r",
    b"\n",
    b"\r\n",
    b"\n\n",
    b"12",
    b"x",
    b"\0",
]
PIECES += [
    "é".encode(),
    "🙂".encode(),
    "🙂".encode()[:2],
    b"\xef\xbb\xbf",
    b"data: ",
    b"\ndata:",
    b": note\n",
]
streams = st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=40).map(b"".join)


@pytest.mark.covers("C24", "D17")
@given(streams)
@example(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n")
@example(b"data: \xf0\x9f\n\n")
def test_events_are_those_of_a_plain_reader(stream: bytes) -> None:
    assert decoded(stream) == reference(stream)


@pytest.mark.covers("C24", "Q-25", "4.1/2")
@given(streams, st.data())
def test_any_split_of_the_stream_gives_the_same_events(stream: bytes, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    assert decoded(*chunks) == decoded(stream)
    assert decoded(*(stream[i : i + 1] for i in range(len(stream)))) == decoded(stream)


def outcome(chunks: list[bytes], limit: int) -> tuple[list[ServerSentEvent], bool]:
    """The events delivered, and whether the limit ended the stream."""
    decoder, found = Decoder(limit), list[ServerSentEvent]()
    try:
        for chunk in chunks:
            found += decoder.feed(chunk)
        found += decoder.close()
    except ValueError:
        return found, True
    return found, False


@given(streams, st.integers(0, 20))
@example(b"data:12345\n\n", 10)
@example(b"data:12345\r\n\r\n", 10)
@example(b"\xef\xbb\xbfdata:12345\n\n", 11)
@example(b"\xef\xbb\xbf\n\n", 2)
def test_cuts_do_not_move_the_limit(stream: bytes, limit: int) -> None:
    assert outcome([stream], limit) == outcome(
        [stream[i : i + 1] for i in range(len(stream))], limit
    )


@pytest.mark.covers("C24")
@pytest.mark.parametrize(
    "end", [b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r", b"\n\r\n", b"\r\n\n", b"\r\n\r"]
)
def test_block_ends_at_any_kind_of_blank_line_and_at_once(end: bytes) -> None:
    assert Decoder().feed(b"data: a" + end) == [ServerSentEvent(data="a")]


@pytest.mark.covers("C24")
def test_all_fields_of_an_event() -> None:
    stream = (
        b": hello\nevent: token\nid: 7\nretry: 1500ms\nsurprise: x\ndata: one\ndata:\ndata: "
        b"two\n\ndata: next\n\n"
    )
    assert decoded(stream) == [
        ServerSentEvent("token", "one\n\ntwo", "7", 1500),
        ServerSentEvent(data="next"),
    ]


@pytest.mark.covers("C24", "D17", "4.1/2")
@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b"data:a", "a"),
        (b"data: a", "a"),
        (b"data:  a ", " a "),
        (b"data:\ta", "\ta"),
        (b"data: a: b", "a: b"),
    ],
)
def test_one_space_is_stripped(line: bytes, data: str) -> None:
    assert decoded(line + b"\n\n") == [ServerSentEvent(data=data)]


@pytest.mark.covers("C24", "D17", "4.1/2")
@pytest.mark.parametrize(
    "block", [b": ping", b":", b"event: done", b"id: 4", b"other: x", b"", b"\n\n\n"]
)
def test_block_without_data_is_no_event_and_keeps_no_state(block: bytes) -> None:
    assert decoded(block + b"\n\ndata: a\n\n") == [ServerSentEvent(data="a")]


def test_empty_data_line_makes_an_event() -> None:
    assert decoded(b"data\n\n") == [ServerSentEvent(data="")]


@pytest.mark.covers("C24")
@pytest.mark.parametrize(
    ("text", "retry"),
    [
        (b"3000", 3000),
        (b"1.5", 1),
        (b"7s", 7),
        (b"soon", None),
        (b"", None),
        (b"-1", None),
        (b"9" * 9999, None),
    ],
)
def test_retry_is_the_leading_number(text: bytes, retry: int | None) -> None:
    assert decoded(b"data\nretry: " + text + b"\n\n") == [ServerSentEvent(retry=retry)]


@pytest.mark.covers("C24")
@pytest.mark.parametrize(
    ("data", "value"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("0", 0),
        ("null", None),
        ("[DONE]", "[DONE]"),
        ("", ""),
        ("\ud800", "\ud800"),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=["object", "zero", "null", "words", "empty", "half a character", "too deep"],
)
def test_data_that_is_not_json_is_given_as_it_is(data: str, value: object) -> None:
    assert ServerSentEvent(data=data).json() == value


def test_event_is_fixed_and_can_be_compared() -> None:
    event = ServerSentEvent(event="a", data="b")
    with pytest.raises(AttributeError):
        event.data = "c"  # type: ignore[misc]
    assert event == ServerSentEvent("a", "b", None, None)
    assert len({event, ServerSentEvent("a", "b")}) == 1


def test_forgotten_last_blank_line_costs_no_event_but_a_cut_line_does() -> None:
    assert decoded(b"data: a\n") == [ServerSentEvent(data="a")]
    assert decoded(b"data: a\r") == [ServerSentEvent(data="a")]
    assert decoded(b'data: {"token"') == []
    assert decoded(b"data: a\ndata: b") == []
    decoder = Decoder()
    decoder.feed(b"data: a\n")
    decoder.close()
    assert decoder.close() == []


@pytest.mark.parametrize(
    "hostile",
    [
        b"x" * 64,
        b"data: x\n" * 64,
        b"data\n" * 64,
        b": never ending" * 64,
        b"event: e\n" * 64,
        b"id: e\n" * 64,
    ],
    ids=["no line", "data", "empty data", "comment", "event", "id"],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_stream_cannot_fill_the_memory(hostile: bytes, size: int) -> None:
    decoder, stream = Decoder(100), b"data: good\n\n" + hostile * 4
    found = list[ServerSentEvent]()

    def read() -> None:
        for start in range(0, len(stream), size):
            found.extend(decoder.feed(stream[start : start + size]))
        decoder.close()

    with pytest.raises(ValueError, match="more than 100 bytes"):
        read()
    assert found == [ServerSentEvent(data="good")]
    with pytest.raises(ValueError, match="more than 100 bytes"):
        decoder.feed(b"data: on\n\n")


def test_usual_limit_is_sixteen_mebibytes() -> None:
    chunk = b"x" * 2**20
    decoder = Decoder()
    decoder.feed(b"data: ")
    for _ in range(15):
        decoder.feed(chunk)
    assert len(decoder.feed(b"\n\n")[0].data) == 15 * 2**20
    for _ in range(16):
        decoder.feed(chunk)
    with pytest.raises(ValueError, match="16777216"):
        decoder.feed(b"x")


def test_line_of_exactly_the_limit_passes_and_comments_may_go_on_for_ever() -> None:
    assert decoded(b"data: " + b"x" * 94 + b"\n\n", limit=100) == [ServerSentEvent(data="x" * 94)]
    assert decoded(b": ping\n" * 1000 + b"data: a\n\n", limit=20) == [ServerSentEvent(data="a")]


async def test_events_come_as_soon_as_they_are_complete() -> None:
    more = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        yield b"data: a\n\ndata: b"
        await more.wait()
        yield b"\n\ndata: c\n"

    stream = events(source())
    assert (await anext(stream)).data == "a"
    more.set()
    assert [event.data async for event in stream] == ["b", "c"]


async def test_reader_that_stops_early_closes_the_source() -> None:
    closed = False

    async def source() -> AsyncIterator[bytes]:
        nonlocal closed
        try:
            while True:
                yield b"data: a\n\n"
        finally:
            closed = True

    stream = events(source())
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert closed


async def test_source_without_aclose_is_read() -> None:
    class Source:
        def __init__(self) -> None:
            self.left = [b"data: ", b"a\n\n"]

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self

        async def __anext__(self) -> bytes:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

    assert [event.data async for event in events(Source())] == ["a"]
    with pytest.raises(ValueError, match="more than 3 bytes"):
        await anext(events(Source(), limit=3))


def cpu_seconds(stream: bytes, size: int) -> float:
    """The best of three readings in pieces of this size."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        decoded(*(stream[i : i + size] for i in range(0, len(stream), size)), limit=2**25)
        taken.append(time.process_time() - began)
    return min(taken)


def test_megabyte_of_small_events_is_quick_and_a_long_line_is_not_read_over_and_over() -> None:
    event = b'data: {"token": "hello", "token_id": 5, "index": 1}\n\n'
    assert cpu_seconds(event * (2**20 // len(event)), 4096) < 0.1
    assert cpu_seconds(b"data: " + b"x" * 2**24 + b"\n\n", 1024) < 1.0
