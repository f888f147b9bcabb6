"""A small server that answers as told: late, never, cut short, with any status. Real sockets on
loopback."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from support import hold_the_door

JSON = "application/json"


@dataclass(frozen=True)
class Answer:
    """One answer. `body` is bytes, or anything JSON can write."""

    status: int = 200
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = JSON
    until: Callable[[], object] | None = None
    """The answer does not begin before this holds: a gate, or a meeting of several requests."""
    delay: float = 0.0
    """Seconds before the answer begins."""
    cut: int | None = None
    """Send only this many bytes of the body, then hang up."""
    drop: bool = False
    """Hang up without a word."""
    pieces: int = 1
    """Send the body in so many pieces."""
    pause: float = 0.0
    """Seconds between one piece and the next."""

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    when: float
    connection: int = 0
    """The number of the connection it came over."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Script: TypeAlias = "Answer | Callable[[Seen], Answer]"

GREETINGS: dict[str, Any] = {
    "client/config": {},
    "create_session": {"session_id": "s"},
    "session_heartbeat": {},
    "sessions/s/finish": {},
    "create_model": {"request_id": "created"},
    "get_info": {"model_id": "created", "model_data": {"model_name": "m"}},
    "get_server_capabilities": {"supported_models": []},
}


class FaultyServer:
    """Answers each path by its script, one answer per request; the last one stays. Greetings work
    by themselves."""

    def __init__(self) -> None:
        self.base_url = ""
        self.seen: list[Seen] = []
        self.connections = 0
        """How many connections were made so far."""
        self.open_connections = 0
        self._scripts: dict[str, deque[Script]] = defaultdict(deque)
        self._lock = threading.Lock()

    def script(self, path: str, *answers: Script) -> None:
        """Say how requests for a path (without /api/v1/) are answered from now on."""
        with self._lock:
            self._scripts[path] = deque(answers)

    def requests(self, path: str) -> list[Seen]:
        """Return the requests that have arrived for a path so far."""
        with self._lock:
            return [seen for seen in self.seen if seen.path == path]

    def _answer(self, seen: Seen) -> Answer:
        with self._lock:
            self.seen.append(seen)
            path = seen.path if seen.path in self._scripts else seen.path.partition("?")[0]
            script = self._scripts.get(path)
            if not script:
                if path.startswith("samplers/"):
                    return Answer(body={"sampler_id": path.partition("/")[2], "base_model": "m"})
                if path in GREETINGS:
                    return Answer(body=GREETINGS[path])
                return Answer(404, {"detail": f"nothing scripted for {seen.path}"})
            answer = script.popleft() if len(script) > 1 else script[0]
        return answer if isinstance(answer, Answer) else answer(seen)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive until an answer says otherwise."""
        self.connections += 1
        self.open_connections += 1
        number = self.connections
        try:
            while await self._exchange(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open_connections -= 1
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        pairs = (line.split(":", 1) for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if target.startswith("http://"):  # a request to a proxy names the whole address
            target = "/" + target.split("/", 3)[3]
        seen = Seen(
            method, target.removeprefix("/api/v1/"), headers, body, time.monotonic(), number
        )
        answer = self._answer(seen)
        while answer.until is not None and not answer.until():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await asyncio.sleep(answer.delay)
        if answer.drop:
            return False
        lines = [
            f"HTTP/1.1 {answer.status} Scripted",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.data)}",
            *(f"{name}: {value}" for name, value in answer.headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        body = answer.data[: answer.cut]
        size = max(1, -(-len(body) // answer.pieces))
        for start in range(0, len(body), size):
            if start:
                await asyncio.sleep(answer.pause)
            writer.write(body[start : start + size])
            await writer.drain()
        await writer.drain()
        return answer.cut is None


@contextmanager
def faulty_server() -> Iterator[FaultyServer]:
    """A scriptable server in a thread of its own."""
    server, ready, stop = FaultyServer(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    exchanges: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchanges[asyncio.ensure_future(server.serve(reader, writer))] = writer

    async def run() -> None:
        listening = await asyncio.start_server(accept, "127.0.0.1", 0)
        server.base_url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        await hold_the_door(listening.sockets[0])
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        for writer in exchanges.values():
            # one that came at the last moment has not begun, and closes nothing by itself
            writer.close()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
