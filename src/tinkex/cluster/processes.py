"""Worker processes on this machine: started as children, and reached by a socket.

`python -m tinkex.cluster.processes FD` is such a child. Its program is not imported again, so a
notebook or a script without a main guard can start workers too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tinkex.cluster.link import Call, LogLine, OnLost, OnNews, Recipe
from tinkex.engine.api import EngineLost

logger = logging.getLogger("tinkex.server")

STOP_SECONDS = 5.0
"""The time that a process gets to end before it is killed."""
NEWS, PING = 0, "ping"


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Starts an engine in a child of this process.

    Attributes:
        recipe: The engine.
        gpu: The number of the GPU that the process sees, if it is to see one only.
    """

    recipe: Recipe
    gpu: int | None = None

    def __call__(self, on_news: OnNews, on_lost: OnLost) -> ProcessLink:
        """Start it."""
        return ProcessLink(self.recipe, self.gpu, on_news, on_lost)


class ProcessLink:
    """The link to a child process."""

    def __init__(self, recipe: Recipe, gpu: int | None, on_news: OnNews, on_lost: OnLost) -> None:
        """Start the child."""
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if gpu is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES", "")
            devices = visible.split(",") if visible else []
            environment["CUDA_VISIBLE_DEVICES"] = devices[gpu] if devices else str(gpu)
        if recipe.threads is not None:
            environment["OMP_NUM_THREADS"] = str(recipe.threads)
        command = [sys.executable, "-m", "tinkex.cluster.processes", str(theirs.fileno())]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal reaches the server alone
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._on_news, self._on_lost = on_news, on_lost
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._send(recipe)
        name = f"tinkex-link-{self._process.pid}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def call(self, call: Call) -> Future[Any]:
        """Send a call."""
        return self._ask(call)

    def cast(self, call: Call) -> None:
        """Send a call whose result nobody waits for."""
        self._send((0, call))

    def ping(self) -> Future[Any]:
        """Ask for a sign of life."""
        return self._ask(PING)

    def _ask(self, what: Call | str) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        self._waiting[number] = future
        try:
            self._send((number, what))
        except EngineLost as error:
            if self._waiting.pop(number, None) is not None:
                future.set_exception(error)
        return future

    def _send(self, message: object) -> None:
        data = pickle.dumps(message, 5)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except (OSError, ValueError):
            raise EngineLost("its process has ended") from None

    def _read(self) -> None:
        """Hand on what the child says, until it is gone."""
        why = ""
        try:
            while True:
                self._take(*pickle.loads(self._connection.recv_bytes()))
        except (OSError, EOFError):
            pass  # the child is gone
        except Exception as error:
            logger.exception("the link to a worker has failed")
            why = f"its link has failed: {type(error).__name__}: {error}"
            self._process.kill()
        self._connection.close()
        code = self._process.wait()
        why = why or f"its process ended with {_status(code)}"
        for number in list(self._waiting):
            if (future := self._waiting.pop(number, None)) is not None:
                future.set_exception(EngineLost(why))
        self._on_lost(why)

    def _take(self, number: int, is_good: bool, value: Any) -> None:
        if number == NEWS:
            self._on_news(value)
        elif (future := self._waiting.pop(number, None)) is not None:
            if is_good:
                future.set_result(value)
            else:
                future.set_exception(value)

    def close(self) -> None:
        """End the process: it leaves when its socket closes, or is killed."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as ours,
        ):
            ours.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join(STOP_SECONDS)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid


def _status(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class _ToServer(logging.Handler):
    """Sends lines of the log to the server."""

    def __init__(self, send: Any) -> None:
        super().__init__()
        self._tell = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        with contextlib.suppress(Exception):
            self._tell(LogLine(record.name, record.levelno, self.format(record)))


def serve(connection: Connection) -> None:
    """Be the child of a server, until it closes the connection."""
    from tinkex.cluster.host import Host, HostFault, make_engine

    sending = threading.Lock()

    def send(*message: object) -> None:
        data = pickle.dumps(message, 5)
        with sending, contextlib.suppress(OSError):
            connection.send_bytes(data)

    recipe: Recipe = pickle.loads(connection.recv_bytes())
    host = Host(lambda: make_engine(recipe), lambda news: send(NEWS, True, news))
    logging.basicConfig(level=logging.INFO, handlers=[_ToServer(host.log)], format="%(message)s")
    while True:
        number, what = pickle.loads(connection.recv_bytes())
        if what == PING:
            send(number, True, None)
            continue
        assert isinstance(what, Call)

        def reply(future: Future[Any], number: int = number) -> None:
            error = future.exception()
            try:
                send(number, error is None, future.result() if error is None else error)
            except Exception as unsendable:
                send(number, False, HostFault(f"its result cannot be sent: {unsendable}"))

        future = host.submit(what)
        if number:
            future.add_done_callback(reply)


def main() -> None:
    """Serve the socket whose number is given."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        serve(connection)
    # the engine may be in the middle of a long step: nothing waits for it any more
    os._exit(0)


if __name__ == "__main__":
    main()
