"""`tinkex auth`: the stored key and its owner."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.options import (
    CommandGroup,
    Connection,
    in_one_line,
    reporting,
    wait,
)
from tinkex.cli.output import CommandError, Outcome, print_fields, write_file, yes_no

if TYPE_CHECKING:
    from tinkex.types.account import ApiKeyResponse

KEYS_PAGE = "https://tinker.thinkingmachines.ai/keys"
VERSION = 1
LONGEST_KEY = 10_000


@click.group(cls=CommandGroup)
def auth() -> None:
    """Log in and out, and show the owner of the key.

    The key is read from --api-key, else from TINKER_API_KEY, else from the output of the command in
    TINKER_CREDENTIAL_CMD, else from the file that `tinkex auth login` writes
    (~/.tinker/credentials.json).
    """


# ── the file ──────────────────────────────────────────────────────────────────────────────────────


def read_credentials(path: Path) -> dict[str, Any]:
    """Read the stored keys; none if there is no file, an error if it is unreadable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not isinstance(found.setdefault("keys", {}), dict):
            raise ValueError("it is not a credentials file")
    except FileNotFoundError:
        return {"version": VERSION, "keys": {}}
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path} cannot be read: {error}; fix it or move it away", error
        ) from None
    return found


def write_credentials(path: Path, book: dict[str, Any]) -> None:
    """Store keys atomically, readable by their owner alone."""
    write_file(path, json.dumps(book), private=True)


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


@auth.command()
@reporting
def login(connection: Connection) -> Outcome:
    """Check a key with the server and store it.

    The key is asked for, or read from standard input, or given with --api-key.
    """
    from tinkex.client.settings.config import HOSTED_URL, is_embedded
    from tinkex.client.settings.credentials import credentials_file

    key = connection.api_key or _ask()
    asked = Connection(key, connection.base_url, connection.timeout)
    url = asked.config().base_url
    if is_embedded(url):
        raise CommandError("the backend inside this process needs no key")
    path = credentials_file()
    book = read_credentials(path)  # before the server is asked, in case it cannot be read
    with asked.rest() as rest:
        known = _describe(rest)
    entry = {
        "type": "manual",
        "key": key,
        "name": known.name,
        "note": known.note,
        "details": known.details,
    }
    if url != HOSTED_URL:
        entry["base_url"] = url  # it is sent there and nowhere else
    book["keys"][str(known.key_id)] = entry
    book["default"] = str(known.key_id)
    write_credentials(path, book)
    who = _owner(known)
    data = {"key_id": known.key_id, "name": known.name, "email": who, "file": str(path)}

    def show() -> None:
        click.echo(f"Logged in as {who or known.name or known.key_id}; the key is kept in {path}")
        if url != HOSTED_URL:
            click.echo(
                f"It is for {url} alone: set TINKER_BASE_URL, or give --base-url, to go there.",
                err=True,
            )

    return Outcome(data, known, show=show)


def _ask() -> str:
    if sys.stdin.isatty():
        host = socket.gethostname()
        click.echo(f"Make a key at {KEYS_PAGE}?new_key=true&key_name=tinkex-{host}", err=True)
        key = str(click.prompt("Key", hide_input=True, err=True))
    else:
        key = sys.stdin.readline(LONGEST_KEY)
    if not key.strip():
        raise CommandError("there is no key: give it on standard input or with --api-key")
    return key.strip()


def _describe(rest: Any) -> ApiKeyResponse:
    """Return the server's description of the key; some servers only accept or refuse it."""
    from tinkex.client.futures.api_future import start
    from tinkex.errors import NotFoundError
    from tinkex.types.account import ApiKeyResponse
    from tinkex.wire import protocol

    async def ask() -> ApiKeyResponse:
        try:
            known: ApiKeyResponse = await rest.transport.call(protocol.GET_API_KEY)
        except NotFoundError:
            await rest.transport.call(protocol.GET_SERVER_CAPABILITIES)
            return ApiKeyResponse(key_id="default")
        return known

    return wait(start(ask()))


def _owner(known: ApiKeyResponse) -> str | None:
    details = known.details.get("user_details")
    found = details.get("email") if isinstance(details, dict) else None
    return found if isinstance(found, str) else None


@auth.command()
@reporting
def logout(connection: Connection) -> Outcome:
    """Delete the stored key.

    A key that a login made is deleted on the server, too.
    """
    from tinkex.client.futures.api_future import start
    from tinkex.client.settings.credentials import credentials_file
    from tinkex.errors import TinkerError
    from tinkex.wire import protocol

    path = credentials_file()
    book = read_credentials(path)
    entry = book["keys"].pop(str(book.pop("default", "")), None)
    if entry is None:
        data = {"removed": False, "file": str(path)}
        return Outcome(data, note=f"There is no login: {path} has no key in use.")
    if isinstance(entry, dict) and entry.get("type") == "generated":
        try:
            with Connection(
                str(entry.get("key")), connection.base_url, connection.timeout
            ).rest() as rest:
                wait(start(rest.transport.call(protocol.DELETE_API_KEY)))
        except TinkerError as error:
            click.echo(f"Warning: the key is still valid on the server: {error}", err=True)
    if book["keys"]:
        write_credentials(path, book)
    else:
        path.unlink(missing_ok=True)
    data = {"removed": True, "file": str(path)}
    own = isinstance(entry, dict) and entry.get("base_url")
    revoked = f"with `tinkex key revoke` on the machine of {own}" if own else f"at {KEYS_PAGE}"
    line = f"Removed the key from {path}. It is valid until it is revoked {revoked}"
    return Outcome(data, show=line)


@auth.command()
@reporting
def status(connection: Connection) -> Outcome:
    """Show whether there is a key and whether the server accepts it.

    Exits with 1 if there is none, or if the server refuses it.
    """
    from tinkex.client.futures.api_future import start
    from tinkex.errors import TinkerError
    from tinkex.wire import protocol

    connection = replace(connection, is_for_accounts=True)
    source = credential_source(connection)
    problem = None
    try:
        with connection.rest() as rest:
            wait(start(rest.transport.call(protocol.GET_SERVER_CAPABILITIES)))
    except TinkerError as error:
        problem = error
    data = {
        "credentials": source is not None,
        "source": source,
        "accessible": problem is None,
        "error": None if problem is None else str(problem),
    }
    fields = {
        "Credentials": f"Yes ({source})" if source else "No",
        "Server accessible": yes_no(problem is None),
    }

    def show() -> None:
        print_fields(fields)
        if problem is not None:
            click.echo(f"Error: {problem}", err=True)

    return Outcome(data, exit_code=0 if problem is None else 1, show=show)


def credential_source(connection: Connection) -> str | None:
    """Return where the key comes from, or None."""
    from tinkex.client.settings import environment
    from tinkex.client.settings.credentials import credentials_file
    from tinkex.errors import ConfigurationError

    if connection.api_key:
        return "--api-key"
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        if environment.text(name):
            return name
    try:
        used = connection.config().api_key
    except ConfigurationError:
        used = None
    return str(credentials_file()) if used else None


@auth.command()
@reporting
def whoami(connection: Connection) -> Outcome:
    """Show the owner of the key, if the server tells."""
    with replace(connection, is_for_accounts=True).rest() as rest, in_one_line(RuntimeError):
        found = wait(rest.whoami())
    data = {"user_urn": found.user_urn, "org_urn": found.org_urn, "email": found.email}
    fields = {"Email": found.email or "N/A", "User": found.user_urn, "Organization": found.org_urn}
    return Outcome(data, found, show=lambda: print_fields(fields))
