"""A server that computes nothing: canned answers over hand-parsed HTTP/1.1, so that a client's own
cost is what shows.

It listens on two ports with the same answers; on the second one, the client config asks for batched
polling (`sample_use_retrieve_futures`). Prints both ports as one JSON line. Requests for the base
model `hold` never end.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import functools
import json
import os
import re
import struct

MARK = re.compile(rb'"request_id":\s*"([^"]*)"')
SESSION = re.compile(rb'"sampling_session_id":\s*"([^"]*)"')
CURSOR = re.compile(rb'"prev_cursor":\s*(\d+)')
AT_ONCE = re.compile(rb'"timeout":\s*0')
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)

ANSWER_TOKENS = 128
DATUM_TOKENS = 2048


def varint(value: int) -> bytes:
    """A protobuf varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def sample_response() -> bytes:
    """One sequence of 128 tokens with log-probabilities, stopped by length."""
    tokens = array.array("i", range(1000, 1000 + ANSWER_TOKENS)).tobytes()
    logprobs = array.array("f", (-0.01 * i for i in range(ANSWER_TOKENS))).tobytes()
    return field(1, b"\x08\x01" + field(2, tokens) + field(3, logprobs))


def pass_output(count: int) -> bytes:
    """Log-probabilities of 2,048 tokens for each of `count` datums, and a loss."""
    logprobs = array.array("f", (-0.001 * i for i in range(DATUM_TOKENS))).tobytes()
    offsets = array.array("q", (len(logprobs) * i for i in range(count + 1))).tobytes()
    tensor = field(1, logprobs * count) + field(2, offsets) + b"\x18\x01"
    record = field(2, field(1, b"logprobs") + field(2, tensor)) + b"\x18" + varint(count)
    loss = field(1, b"loss:sum") + b"\x11" + struct.pack("<d", 1.5)
    return field(1, b"ArrayRecord") + field(2, record) + field(3, loss)


def count_datums(body: bytes | bytearray) -> int:
    """How many datums a ForwardBackwardRequest holds, by walking its top level."""
    position, count = 0, 0

    def read() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = body[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while position < len(body):
        tag = read()
        size = read()
        if tag & 7 == 2:
            position += size
            count += tag >> 3 == 3
    return count


def reply(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """A whole HTTP answer."""
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        kind,
        len(body),
        body,
    )


PROTOBUF = b"application/x-protobuf"
EMPTY = reply(b"{}")
MODEL = reply(b'{"model_id":"sess-1:train:0"}')
PENDING = reply(b'{"queue_state":"active"}', status=b"408 Request Timeout")
SAMPLE = reply(sample_response(), PROTOBUF)
FIXED = {
    b"client/dynamic_config": EMPTY,
    b"session_heartbeat": EMPTY,
    b"get_info": reply(
        b'{"type":"get_info","model_id":"sess-1:train:0","model_data":{"model_name":"null"}}'
    ),
    b"create_session": reply(b'{"session_id":"sess-1"}'),
    b"create_model": reply(b'{"request_id":"model"}'),
    b"optim_step": reply(b'{"request_id":"optim"}'),
    b"telemetry": reply(b'{"status":"accepted"}'),
    b"cancel_future": EMPTY,
}


class Log:
    """Completions of one sampling session, for the batched poller."""

    def __init__(self) -> None:
        self.dropped = 0
        self.ids: list[bytes] = []
        self.waiting: list[tuple[Connection, int, asyncio.TimerHandle]] = []

    def answer(self, cursor: int) -> bytes | None:
        """What has ended after a cursor; the earlier ones are forgotten."""
        drop = min(cursor - self.dropped, len(self.ids))
        if drop > 0:
            del self.ids[:drop]
            self.dropped += drop
        if not self.ids:
            return None
        size = len(SAMPLE) - SAMPLE.index(b"\r\n\r\n") - 4
        found = b",".join(
            b'{"state":"finished","request_id":"%s","response_payload_uncompressed_size":%d}'
            % (name, size)
            for name in self.ids
        )
        return reply(b'{"completions":[%s],"cursor":%d}' % (found, self.dropped + len(self.ids)))


class State:
    """What all connections share."""

    def __init__(self, hold: float) -> None:
        self.hold = hold
        self.number = 0
        self.logs: dict[bytes, Log] = {}
        self.outputs: dict[int, bytes] = {}

    def log(self, session: bytes) -> Log:
        """The completions of a sampling session."""
        return self.logs.setdefault(session, Log())

    def output(self, count: int) -> bytes:
        """The result of a pass over `count` datums."""
        if count not in self.outputs:
            self.outputs[count] = reply(pass_output(count), PROTOBUF)
        return self.outputs[count]


class Connection(asyncio.Protocol):
    """One connection: reads requests, writes canned answers."""

    def __init__(self, state: State, config: bytes) -> None:
        self.state = state
        self.config = config
        self.buffer = bytearray()
        self.path = b""
        self.body_start = 0
        self.body_end = -1
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Answers that are still to come go nowhere."""
        self.transport = None

    def write(self, data: bytes) -> None:
        """Send, if someone is still there."""
        if self.transport is not None:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Take requests off the buffer."""
        self.buffer += data
        while self.buffer:
            if self.body_end < 0 and not self.head():
                return
            if len(self.buffer) < self.body_end:
                return
            body = self.buffer[self.body_start : self.body_end]
            del self.buffer[: self.body_end]
            self.body_end = -1
            self.answer(self.path, body)

    def head(self) -> bool:
        """Read a request's head, if it is all there."""
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.buffer[:end])
        self.path = head[: head.index(b"\r\n")].split(b" ")[1].partition(b"/api/v1/")[2]
        self.body_start = end + 4
        found = LENGTH.search(head)
        if found is None and CHUNKED.search(head):
            raise SystemExit("the null server takes no chunked bodies")
        self.body_end = self.body_start + (int(found[1]) if found else 0)
        return True

    def answer(self, path: bytes, body: bytearray) -> None:
        """Answer one request."""
        state = self.state
        if path == b"retrieve_future":
            self.retrieve(body)
        elif path == b"asample":
            found = SESSION.search(body)
            session = found[1] if found else b""
            held = session.startswith(b"hold")
            state.number += 1
            name = b"%s-%d" % (b"hold" if held else b"s", state.number)
            self.write(reply(b'{"request_id":"%s","sample_sequence_ids":["%s:0"]}' % (name, name)))
            if not held and self.config != b"{}":
                log = state.log(session)
                log.ids.append(name)
                for other, cursor, timer in log.waiting:
                    timer.cancel()
                    other.write(log.answer(cursor) or EMPTY)
                log.waiting.clear()
        elif path == b"retrieve_futures":
            self.retrieve_many(body)
        elif path == b"forward_backward":
            state.number += 1
            self.write(reply(b'{"request_id":"pass-%d-%d"}' % (count_datums(body), state.number)))
        elif path == b"create_sampling_session":
            kind = b"hold" if b'"hold"' in body else b"sess-1"
            state.number += 1
            self.write(reply(b'{"sampling_session_id":"%s:sample:%d"}' % (kind, state.number)))
        elif path == b"client/config":
            self.write(reply(self.config))
        else:
            self.write(FIXED.get(path, EMPTY))

    def retrieve(self, body: bytearray) -> None:
        """Answer a poll for one future."""
        found = MARK.search(body)
        name = found[1] if found else b""
        if name.startswith(b"s-"):
            self.write(SAMPLE)
        elif name.startswith(b"pass-"):
            self.write(self.state.output(int(name.split(b"-")[1])))
        elif name.startswith(b"hold"):
            asyncio.get_running_loop().call_later(self.state.hold, self.write, PENDING)
        else:
            self.write(MODEL if name == b"model" else EMPTY)

    def retrieve_many(self, body: bytearray) -> None:
        """Answer a poll for all futures of a sampling session, or hold it until one has ended."""
        session, cursor = SESSION.search(body), CURSOR.search(body)
        place = int(cursor[1]) if cursor else 0
        log = self.state.log(session[1] if session else b"")
        data = log.answer(place)
        if data is not None:
            self.write(data)
            return
        nothing = reply(b'{"completions":[],"cursor":%d}' % place)
        if AT_ONCE.search(body):
            self.write(nothing)
            return
        timer = asyncio.get_running_loop().call_later(self.state.hold, self.expire, log, nothing)
        log.waiting.append((self, place, timer))

    def expire(self, log: Log, nothing: bytes) -> None:
        """Let a held batched poll end with nothing."""
        log.waiting = [entry for entry in log.waiting if entry[0] is not self]
        self.write(nothing)


async def serve(hold: float) -> None:
    """Listen on two ports for ever."""
    loop = asyncio.get_running_loop()
    state = State(hold)
    ports = []
    for config in (b"{}", b'{"sample_use_retrieve_futures":true}'):
        connect = functools.partial(Connection, state, config)
        server = await loop.create_server(connect, "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=None, help="pin to this core")
    parser.add_argument(
        "--hold", type=float, default=20.0, help="seconds a poll without a result is held"
    )
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    asyncio.run(serve(args.hold))


if __name__ == "__main__":
    main()
