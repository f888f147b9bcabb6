"""`tinkex serve`: the embedded server on a port."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sqlite3
import sys
from pathlib import Path

import click

from tinkex.config import LOOPBACK
from tinkex.engine import EngineError
from tinkex.local import DEFAULT_MODEL, default_data_dir, make_engine, publish_tokenizers


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Where checkpoints and facts are kept. [default: TINKEX_DATA_DIR]",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME[=DIR]",
    help=f"A model to serve: a bundled name, a hub id, or NAME=DIR. Repeatable.  [default: {DEFAULT_MODEL}]",
)
@click.option(
    "--api-key",
    envvar="TINKEX_SERVER_API_KEY",
    help="Key that clients must send (better set TINKEX_SERVER_API_KEY).",
)
@click.option(
    "--hub-cache/--no-hub-cache",
    default=True,
    show_default=True,
    help="Put the models' tokenizers into the Hugging Face cache, for clients on this machine.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="warning",
    show_default=True,
    help="How much to log, to stderr.",
)
def serve(
    host: str,
    port: int,
    data_dir: Path | None,
    models: tuple[str, ...],
    api_key: str | None,
    hub_cache: bool,
    log_level: str,
) -> None:
    """Serve models on this machine to any Tinker client.

    Prints one line with the URL when it is ready. Point a client there with TINKER_BASE_URL; the official client also
    wants a TINKER_API_KEY that starts with "tml-", and any such key will do while the server is open. Without a
    network, give it HF_HUB_OFFLINE=1 as well, or it looks for the tokenizer there first.
    """
    if host not in LOOPBACK and not api_key:
        raise click.UsageError(
            f"listening on {host} would let anyone in: set TINKEX_SERVER_API_KEY, or listen on 127.0.0.1"
        )
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    places = dict(_parse_model(model) for model in models)
    try:
        listener = _listen(host, port)
    except OSError as error:
        advice = "; --port 0 picks a free one" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}{advice}") from None
    os.environ["TINKEX_HUB_CACHE"] = "1" if hub_cache else "0"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn stops cleanly, then passes the signal on
    try:
        with listener:
            asyncio.run(_serve(listener, data_dir or default_data_dir(), places, api_key))
    except (EngineError, OSError, sqlite3.Error) as error:
        raise click.ClickException(str(error)) from None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _parse_model(text: str) -> tuple[str, str]:
    name, _, directory = text.partition("=")
    if not name:
        raise click.UsageError(f"--model {text!r}: expected NAME or NAME=DIR")
    return name, directory


async def _serve(listener: socket.socket, data_dir: Path, models: dict[str, str], api_key: str | None) -> None:
    engine = make_engine(models)
    publish_tokenizers(engine)
    import uvicorn

    from tinkex.server.app import create_app

    names = ", ".join(model.name for model in engine.models())
    access = "key required" if api_key else "open, no key needed"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                url = _url(listener)
                click.echo(f"tinkex serving at {url}  models: {names}  data: {data_dir}  ({access})")

    app = create_app(engine, data_dir, api_key=api_key)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_keep_alive=75, lifespan="on", timeout_graceful_shutdown=2
    )
    await Server(config).serve(sockets=[listener])


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
