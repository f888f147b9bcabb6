"""`tinkex session`: list sessions, and finish those left open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import click

from tinkex.cli.options import CommandGroup, Connection, connecting, formatted, switch, wait
from tinkex.cli.outcomes import CommandError, Outcome, reason_of
from tinkex.cli.output import Column, print_fields, print_json, print_table, size
from tinkex.cli.progress import fetch_pages, transfer, waiting
from tinkex.cli.runs import scope_option

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

PAGE = 100


@click.group(cls=CommandGroup)
def session() -> None:
    """List, look up and finish sessions."""


@session.command("list")
@click.option(
    "--limit", type=int, default=20, show_default=True, help="Number to list; 0 means all."
)
@click.option("--offset", type=int, default=0, show_default=True, help="Number to skip.")
@scope_option
@formatted
@connecting
def list_command(
    limit: int, offset: int, access_scope: Any, as_json: bool, connection: Connection
) -> Outcome:
    """List the ids of sessions, the newest first."""
    with connection.rest() as rest:

        def fetch(count: int, start: int) -> tuple[list[str], None]:
            return wait(rest.list_sessions(count, start, access_scope)).sessions, None

        found, _ = fetch_pages(fetch, "sessions", PAGE, limit, offset)
    data = {"sessions": found, "shown": len(found)}
    if as_json:
        print_json(data)
    else:
        print_table(
            f"Sessions ({len(found)})", [Column("ID", folds=True)], [[item] for item in found]
        )
    return Outcome(data, found)


@session.command()
@click.argument("session_id")
@scope_option
@formatted
@connecting
def info(session_id: str, access_scope: Any, as_json: bool, connection: Connection) -> Outcome:
    """Show the training runs and samplers of a session."""
    with connection.rest() as rest:
        found = wait(_checked(lambda: rest.get_session(session_id, access_scope)))
    data = {
        "session_id": session_id,
        "display_name": found.display_name,
        "training_run_ids": found.training_run_ids,
        "sampler_ids": found.sampler_ids,
        "user_metadata": found.user_metadata,
    }
    if as_json:
        print_json(data)
        return Outcome(data, found)
    fields: dict[str, object] = {"ID": session_id}
    if found.display_name:
        fields["Name"] = found.display_name
    fields["Training runs"] = ", ".join(found.training_run_ids) or "none"
    fields["Samplers"] = ", ".join(found.sampler_ids) or "none"
    if found.user_metadata:
        fields["Metadata"] = ", ".join(
            f"{name}={value}" for name, value in found.user_metadata.items()
        )
    print_fields(fields)
    return Outcome(data, found)


@session.command()
@click.argument("session_id")
@click.option(
    "--reason",
    type=click.Choice(["success", "errored", "interrupted"]),
    default="success",
    show_default=True,
    help="How it ended.",
)
@click.option("--detail", metavar="TEXT", help="A note about its end.")
@formatted
@connecting
def finish(
    session_id: str, reason: Any, detail: str | None, as_json: bool, connection: Connection
) -> Outcome:
    """Finish a session that a program left open.

    Its runs are unloaded, its checkpoints stay.
    """
    with connection.rest() as rest:
        wait(_checked(lambda: rest.finish_session(session_id, reason, detail)))
    data = {
        "command": "session finish",
        "action": "finish",
        "session_id": session_id,
        "reason": reason,
    }
    if as_json:
        print_json(data)
    else:
        click.echo(f"Finished {session_id}")
    return Outcome(data)


@session.command("export-trace")
@click.argument("session_id")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Output file.  [default: ./SESSION_ID.pftrace]",
)
@switch("--url-only", help="Print the address of the trace, and do not fetch it.")
@formatted
@connecting
def export_trace(
    session_id: str, output: Path | None, url_only: bool, as_json: bool, connection: Connection
) -> Outcome:
    """Fetch a session's timeline as a Perfetto trace.

    Not all servers make them.
    """
    if url_only and output is not None:
        raise click.UsageError("--output has no effect with --url-only")
    target = output or Path(f"{session_id.replace('/', '_')}.pftrace")
    with connection.rest() as rest:
        try:
            with waiting("the trace is not ready yet"):
                url: str = wait(_checked(lambda: rest.export_session_trace(session_id)))
            data: dict[str, Any] = {"session_id": session_id, "url": url}
            if not url_only:
                _bring(rest, url, target)
                written = target.stat().st_size
                data = {
                    "session_id": session_id,
                    "destination": str(target),
                    "file_size_bytes": written,
                }
        except (RuntimeError, OSError) as error:
            raise CommandError(reason_of(error), error) from None
    if as_json:
        print_json(data)
    elif url_only:
        click.echo(url)
    else:
        click.echo(f"Wrote {target} ({size(data['file_size_bytes'])})")
    return Outcome(data)


def _bring(rest: RestClient, url: str, target: Path) -> None:
    """Fetch a trace; a backend inside this process has written it to a local file."""
    from tinkex.client.futures.api_future import start
    from tinkex.client.settings.config import is_embedded
    from tinkex.hub.fetches import fetch

    async def address() -> str:
        return url

    target.parent.mkdir(parents=True, exist_ok=True)
    # continued by the next one when this one is stopped
    part = target.with_name(f".{target.name}.partial")
    if is_embedded(rest.transport.config.base_url):
        shutil.copyfile(url2pathname(urlsplit(url).path), part)
    else:
        with transfer(f"Downloading {target.name}") as meter:
            wait(start(fetch(rest.transport, address, part, meter)))
    os.replace(part, target)


def _checked(call: Any) -> Any:
    """Start a call; wrong arguments are reported before anything is sent."""
    try:
        return call()
    except ValueError as error:
        raise CommandError(str(error), error) from None
