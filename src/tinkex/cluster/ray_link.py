"""Worker processes that Ray places on the machines of a cluster; no other module imports Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from tinkex.cluster.host import Host, HostFault, make_engine
from tinkex.cluster.link import Call, LogLine, News, OnLost, OnNews, Recipe
from tinkex.engine.api import EngineError, EngineLost
from tinkex.errors import ConfigurationError

logger = logging.getLogger("tinkex.server")

NAMESPACE = "tinkex"
LOOPBACK = ("127.", "localhost", "[::1]", "::1")
NEWS_SECONDS = 5.0
"""The longest time that a request for news waits."""
START_SECONDS = 600.0
"""The longest time to find a place for a worker and to load its models."""
CALLS = 10_000
"""The number of calls that may wait in a worker."""


def join(address: str | None) -> None:
    """Join a cluster of Ray, or start one on this machine without an address.

    Raises:
        ConfigurationError: It cannot be joined, or other machines could join without a token.
    """
    if ray.is_initialized():
        return
    if address is not None and not address.startswith(LOOPBACK) and not has_token():
        raise ConfigurationError(
            f"the Ray cluster at {address} is not on loopback, and no Ray token is set: a machine "
            "that reaches it can run any code",
            hint="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on every machine of the cluster",
        )
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigurationError(
            f"the Ray cluster at {address or 'this machine'} cannot be joined: {error}",
            hint="this machine must be a node of the cluster: ray start --address=HOST:PORT",
        ) from error


def has_token() -> bool:
    """Return True if Ray asks for a token, and there is one."""
    return os.environ.get("RAY_AUTH_MODE") == "token" and bool(
        os.environ.get("RAY_AUTH_TOKEN")
        or Path(
            os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
        ).is_file()
    )


class HostActor:
    """A host as an actor of Ray."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        if recipe.threads is not None:  # else Ray's choice: one for each processor it counts
            os.environ["OMP_NUM_THREADS"] = str(recipe.threads)
        self._loop = asyncio.get_event_loop()
        self._news: list[News] = []
        self._came = asyncio.Event()
        self._connection = ""
        self._next = 1
        self._turn = asyncio.Condition()
        self._host = Host(lambda: make_engine(recipe), self._tell)
        logging.basicConfig(level=logging.INFO, handlers=[_ToHost(self._host)], force=True)

    def _tell(self, news: News) -> None:
        self._loop.call_soon_threadsafe(self._add, news)

    def _add(self, news: News) -> None:
        self._news.append(news)
        self._came.set()

    async def recipe(self) -> Recipe:
        """Return what the engine was made of."""
        return self._recipe

    async def call(self, connection: str, number: int, call: Call) -> tuple[bool, Any]:
        """Carry out a call, after those of the same connection with smaller numbers."""
        if number == 1:
            self._connection, self._next = connection, 1
            self._news.clear()
        async with self._turn:
            await self._turn.wait_for(
                lambda: self._connection != connection or self._next == number
            )
            future = self._host.submit(call)
            self._next += self._connection == connection
            self._turn.notify_all()
        try:
            return True, await asyncio.wrap_future(future)
        except EngineError as error:
            return False, error
        except Exception as error:
            return False, HostFault(f"{type(error).__name__}: {error}")

    async def news(self, connection: str) -> list[News] | None:
        """Return what has happened, after some time at the latest; None to an older server."""
        if not self._news:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_SECONDS):
                    await self._came.wait()
        if connection != self._connection:
            return None
        self._came.clear()
        news, self._news = self._news, []
        return news

    async def ping(self) -> None:
        """Answer."""


class _ToHost(logging.Handler):
    """Sends lines of the log to the server."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        self._host.log(LogLine(record.name, record.levelno, self.format(record)))


@dataclass(frozen=True, slots=True)
class StartActor:
    """Starts an engine as an actor, or takes over the one that an earlier server left.

    Attributes:
        name: The name of the actor.
        recipe: The engine.
        gpus: The number of its GPUs.
        cpus: The number of processors that it is counted for.
    """

    name: str
    recipe: Recipe
    gpus: float = 0
    cpus: float = 1

    def __call__(self, on_news: OnNews, on_lost: OnLost) -> RayLink:
        """Start it."""
        actor = self._found() or self._started()
        return RayLink(actor, on_news, on_lost)

    def _found(self) -> Any:
        try:
            actor = ray.get_actor(self.name, NAMESPACE)
            if ray.get(actor.recipe.remote(), timeout=NEWS_SECONDS) == self.recipe:
                return actor
        except (ValueError, RayError):
            return None
        ray.kill(actor)
        return None

    def _started(self) -> Any:
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        there = ray.cluster_resources()
        for kind, number in wanted.items():
            if number > there.get(kind, 0):
                raise EngineError(
                    f"worker {self.name!r} needs {number:g} {kind}, and the cluster has "
                    f"{there.get(kind, 0):g}; add a machine, or ask for less",
                    "server",
                )
        kind = ray.remote(HostActor).options(
            name=self.name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_gpus=self.gpus,
            num_cpus=self.cpus,
            max_concurrency=CALLS,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        for _ in range(10):
            try:
                actor = kind.remote(self.recipe)
                break
            except ValueError:  # the name of one that has just died is still taken
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(self.name, NAMESPACE))
                threading.Event().wait(0.2)
        else:
            raise EngineError(
                f"worker {self.name!r} cannot be started: its name is taken", "server"
            )
        try:
            ray.get(actor.ping.remote(), timeout=START_SECONDS)
        except GetTimeoutError:
            ray.kill(actor)
            raise EngineError(
                f"worker {self.name!r} has found no place in {START_SECONDS:.0f} s: the cluster's "
                f"free resources are {_told(ray.available_resources())}",
                "server",
            ) from None
        except RayError as error:
            raise EngineError(
                f"worker {self.name!r} cannot be started: {error}", "server"
            ) from None
        return actor


def _told(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in resources)


class RayLink:
    """The link to an actor."""

    def __init__(self, actor: Any, on_news: OnNews, on_lost: OnLost) -> None:
        self._actor, self._on_news, self._on_lost = actor, on_news, on_lost
        self._connection = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._is_closed = False
        self._has_begun = threading.Event()
        threading.Thread(target=self._listen, name="tinkex-link", daemon=True).start()

    def call(self, call: Call) -> Future[Any]:
        """Send a call."""
        answer: Future[Any] = Future()

        def answered(done: Future[Any]) -> None:
            try:
                is_good, value = done.result()
            except RayError as error:
                answer.set_exception(EngineLost(_reason(error)))
            else:
                if is_good:
                    answer.set_result(value)
                else:
                    answer.set_exception(value)

        with self._sending:
            reference = self._actor.call.remote(self._connection, next(self._numbers), call)
        self._has_begun.set()
        reference.future().add_done_callback(answered)
        return answer

    def cast(self, call: Call) -> None:
        """Send a call whose result nobody waits for."""
        with self._sending:
            self._actor.call.remote(self._connection, next(self._numbers), call)

    def ping(self) -> Future[Any]:
        """Ask for a sign of life."""
        answer: Future[Any] = Future()

        def answered(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(
                    EngineLost(_reason(error)) if isinstance(error, RayError) else error
                )

        self._actor.ping.remote().future().add_done_callback(answered)
        return answer

    def _listen(self) -> None:
        self._has_begun.wait()
        while not self._is_closed:
            try:
                found = ray.get(self._actor.news.remote(self._connection))
            except RayError as error:
                if not self._is_closed:
                    self._on_lost(_reason(error))
                return
            except SystemExit:  # this process leaves the cluster
                return
            except Exception as error:
                if not self._is_closed:
                    self._on_lost(f"the link has failed: {error}")
                return
            if found is None:
                self._on_lost("a newer server has taken it over")
                return
            for news in found:
                self._on_news(news)

    def close(self) -> None:
        """End the actor."""
        self._is_closed = True
        self._has_begun.set()
        with contextlib.suppress(Exception):
            ray.kill(self._actor)


def _reason(error: RayError) -> str:
    return f"Ray says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
