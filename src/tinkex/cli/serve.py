"""`tinkex serve`: the embedded server on a port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from tinkex.cli.options import option, together
from tinkex.client.settings.config import LOOPBACK
from tinkex.engine.api import Engine, EngineError
from tinkex.engine.registry import engine_names, find_engine
from tinkex.errors import ConfigurationError
from tinkex.local import (
    DEFAULT_ENGINE,
    DEFAULT_MODEL,
    Dtype,
    default_data_dir,
    make_engine,
    make_fleet,
    publish_tokenizers,
    unusable,
)
from tinkex.otel import is_available
from tinkex.server.access.keys import has_keys
from tinkex.server.database.interface import DatabaseError
from tinkex.server.database.sqlite import SqliteDatabase, is_database
from tinkex.server.files.data_dir import DataDirError
from tinkex.server.server_limits import Limits
from tinkex.server.server_metrics import JsonFormatter, access
from tinkex.server.tracing import Tracing, is_wanted

if TYPE_CHECKING:
    from tinkex.server.workers.fleet import Fleet

SWITCH_SECONDS = 0.0005
"""Longest time the engine may hold the interpreter when the event loop wants it.

Python's default is ten times that.
"""
YOUNG_OBJECTS = 1_000
NEVER = 1_000_000
COLLECT_SECONDS = 300.0
"""Seconds between full garbage collections."""


class EngineOption(click.Option):
    """An option whose value is an engine; its choices are read when they are shown."""

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the names, as the help shows them."""
        return f"[{'|'.join(engine_names())}]"


def _check_engine(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        find_engine(value)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from None
    return value


LIMIT_NAMES = [limit.name for limit in dataclasses.fields(Limits)]
limit_options = together(
    *(
        option(
            f"--{limit.name.replace('_', '-')}",
            limit.metadata["help"],
            type=click.IntRange(1) if isinstance(limit.default, int) else click.FloatRange(0),
            default=limit.default,
        )
        for limit in dataclasses.fields(Limits)
    )
)
"""Adds an option for each limit of the server."""


@click.command()
@option("--host", "Address to listen on.", default="127.0.0.1")
@option(
    "--port",
    "Port to listen on; 0 picks a free one.",
    type=click.IntRange(0, 65535),
    default=8000,
)
@option(
    "--data-dir",
    "Directory for checkpoints and state. [default: TINKEX_DATA_DIR]",
    type=click.Path(path_type=Path),
)
@option(
    "--model models",
    "A model to serve: a bundled name, a hub id, or NAME=DIR. Repeatable.  [default: "
    f"{DEFAULT_MODEL}]",
    multiple=True,
    metavar="NAME[=DIR]",
)
@option(
    "--engine",
    "The engine that trains and samples.",
    cls=EngineOption,
    callback=_check_engine,
    default=DEFAULT_ENGINE,
)
@option(
    "--device",
    "Device of the engine: auto, cpu or cuda; auto takes a GPU if there is one. "
    "CUDA_VISIBLE_DEVICES picks among several.",
    default="auto",
)
@option(
    "--dtype",
    "Type of the base weights.  [default: float32 on a CPU, bfloat16 on a GPU]",
    choices=get_args(Dtype),
)
@option(
    "--workers",
    "Where engines run: local (in this process), local:N (N processes), ray, or ray:HOST:PORT.",
    default="local",
    metavar="WHERE",
)
@option(
    "--cluster",
    "A TOML file with the trainers and samplers of each model; they run where --workers says.",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
)
@option(
    "--shared",
    "Whether workers see the data directory; auto tries it. Otherwise files are sent.",
    default="auto",
    choices=["auto", "yes", "no"],
)
@option(
    "--api-key",
    "Key that clients must send, besides those of `tinkex key create` (better set "
    "TINKEX_SERVER_API_KEY).",
    envvar="TINKEX_SERVER_API_KEY",
)
@option(
    "--tokens/--no-tokens",
    "Have clients exchange their key for tokens that are valid for an hour.",
    default=False,
)
@option(
    "--strict",
    "Load weights as a run's first operation only, as the hosted service does.",
    is_flag=True,
)
@option(
    "--hub-cache/--no-hub-cache",
    "Put the models' tokenizers into the Hugging Face cache, for clients on this machine.",
    default=True,
)
@option(
    "--log-level",
    "Log level; logs go to stderr.",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="warning",
)
@option(
    "--log-format",
    "Log format; json has a line for each request as well, of polls and heartbeats with "
    "--log-level debug.",
    default="text",
    choices=["text", "json"],
)
@option(
    "--otel/--no-otel",
    "Make an OpenTelemetry span of each request.  [default: when an OTEL_ variable is set and it "
    "is installed]",
    default=None,
)
@limit_options
def serve(
    host: str,
    port: int,
    data_dir: Path | None,
    models: tuple[str, ...],
    engine: str,
    device: str,
    dtype: Dtype | None,
    workers: str,
    cluster: Path | None,
    shared: Literal["auto", "yes", "no"],
    hub_cache: bool,
    log_level: str,
    log_format: str,
    otel: bool | None,
    **access: Any,
) -> None:
    """Serve models on this machine to any Tinker client.

    Prints one line with the URL when it is ready. Point a client there with TINKER_BASE_URL; the
    official client also wants a TINKER_API_KEY that starts with "tml-", and any such key will do
    while the server is open. Without a network, give it HF_HUB_OFFLINE=1 as well, or it looks for
    the tokenizer there first.
    """
    data_dir = data_dir or default_data_dir()
    limits = Limits(**{name: access.pop(name) for name in LIMIT_NAMES})
    with _using(data_dir):
        is_open = not access["api_key"] and not _has_keys(data_dir)
    if host not in LOOPBACK and is_open:
        raise click.UsageError(
            f"listening on {host} would let anyone in: create a key with `tinkex key create`, set "
            "TINKEX_SERVER_API_KEY, or listen on 127.0.0.1"
        )
    _log(log_level, log_format)
    tracing = _tracing(otel)
    places = dict(_parse_model(model) for model in models)
    device = find_engine(engine).pick_device(device)
    fleet = make_fleet(
        workers,
        places,
        data_dir=data_dir,
        device=device,
        dtype=dtype,
        engine=engine,
        cluster=cluster,
        shared=shared,
    )
    make = partial(make_engine, places, device, dtype, engine) if fleet is None else lambda: fleet
    try:
        listener = _listen(host, port)
    except OSError as error:
        advice = "; --port 0 picks a free one" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(
            f"cannot listen on {host}:{port}: {error.strerror or error}{advice}"
        ) from None
    os.environ["TINKEX_HUB_CACHE"] = "1" if hub_cache else "0"
    # uvicorn stops cleanly, then passes the signal on
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = {"limits": limits, "tracing": tracing, **access}
    with (
        _using(data_dir),
        listener,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        runner.run(_serve(listener, data_dir, make, device, settings))


@contextlib.contextmanager
def _using(data_dir: Path) -> Iterator[None]:
    """Report a data directory or an engine that cannot be used in one line."""
    try:
        yield
    except (OSError, DataDirError, DatabaseError) as error:
        raise click.ClickException(str(unusable(data_dir, error))) from None
    except EngineError as error:
        raise click.ClickException(str(error)) from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop, which holds the interpreter least while it reads and writes."""
    sys.setswitchinterval(SWITCH_SECONDS)
    if importlib.util.find_spec("uvloop") is None:  # not there on Windows
        return None
    import uvloop

    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return loop_factory


def _log(level: str, form: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
        access.setLevel(logging.DEBUG if level == "debug" else logging.INFO)


def _tracing(asked: bool | None) -> Tracing | None:
    if asked or (asked is None and is_wanted(os.environ) and is_available()):
        try:
            return Tracing()
        except ConfigurationError as error:
            raise click.UsageError(f"--otel: {error}") from None
    return None


def _has_keys(data_dir: Path) -> bool:
    data_dir = data_dir.expanduser()
    if not is_database(data_dir):
        return False
    with contextlib.closing(SqliteDatabase(data_dir)) as database:
        return has_keys(database)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends small packets at once; without it each answer is held
    # back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _parse_model(text: str) -> tuple[str, str]:
    name, _, directory = text.partition("=")
    if not name:
        raise click.UsageError(f"--model {text!r}: expected NAME or NAME=DIR")
    return name, directory


async def _serve(
    listener: socket.socket,
    data_dir: Path,
    make: Callable[[], Engine | Fleet],
    device: str,
    settings: Mapping[str, Any],
) -> None:
    from tinkex.server.app import create_app

    app = create_app(make(), data_dir, **settings)
    models = app.state.server.workers.models()
    publish_tokenizers(models.values())
    names = ", ".join(models)
    needs_key = await app.state.server.accounts.needs_key()
    access = "key required" if needs_key else "open, no key needed"
    ready = (
        f"tinkex serving at {_url(listener)}  models: {names}  device: {device}  data: "
        f"{data_dir}  ({access})"
    )
    await run_app(app, listener, lambda: click.echo(ready))


async def run_app(app: Any, listener: socket.socket, on_ready: Callable[[], object]) -> None:
    """Serve until a signal; then finish what is possible in time, and leave the rest on disk.

    A second signal ends the process at once.
    """
    import uvicorn

    from tinkex.server.access.connections import protocol_of

    collecting: asyncio.Task[None]

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            nonlocal collecting
            await super().startup(sockets)
            if self.started:
                collecting = asyncio.create_task(_collect_garbage())
                on_ready()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:  # as by kill -9, after which nothing is lost either
                os._exit(128 + sig)
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            collecting.cancel()
            await app.state.server.drain()  # clients can still fetch their results meanwhile
            await app.state.server.leave()
            await super().shutdown(sockets)
            if getattr(self.lifespan, "shutdown_failed", False):
                raise EngineError("the server could not finish cleanly: see its log", "server")

    config = uvicorn.Config(
        app,
        http=protocol_of(app.state.server.limits),
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    await Server(config).serve(sockets=[listener])


async def _collect_garbage() -> None:
    """Collect garbage among all objects, rarely, until cancelled.

    A full collection stops every thread: for 0.1 s with torch and some thousand samples in flight.
    Under load Python would do one every few seconds. The 180,000 objects that torch brings never
    go, so they are frozen first.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, NEVER)
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        gc.collect()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
