"""`tinkex key`: the keys of a server on this machine. A running server sees what is done here at once."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import click

from tinkex.local import default_data_dir
from tinkex.server.accounts import create_key, list_keys, revoke_key
from tinkex.server.store import DATABASE, LOCAL_OWNER, Store

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The server's data directory. [default: TINKEX_DATA_DIR]",
)


@click.group()
def key() -> None:
    """Make, list and revoke the keys of a server on this machine.

    As soon as one has been made, the server of that data directory lets nobody in without a key.
    """


@key.command()
@click.argument("name")
@click.option(
    "--owner",
    default=LOCAL_OWNER,
    show_default=True,
    help="Whose key it is: sessions, runs and checkpoints made with it are seen by keys of the same owner only.",
)
@data_dir_option
def create(name: str, owner: str, data_dir: Path | None) -> None:
    """Make a key called NAME and print it: this once, for only a hash of it is kept."""
    if not owner.strip() or not owner.isprintable():
        raise click.UsageError("--owner must be a name")
    with _store(data_dir, new=True) as store:
        number, made = create_key(store, name, owner)
    click.echo(made)
    click.echo(f"key {number} ({name}) of {owner}; it will not be shown again", err=True)


@key.command("list")
@data_dir_option
def list_command(data_dir: Path | None) -> None:
    """List all keys, one a line: number, owner, name, made, last used, and whether it has been revoked."""
    with _store(data_dir) as store:
        for known in list_keys(store):
            used = f"used {_day(known.last_used)}" if known.last_used else "never used"
            state = f"revoked {_day(known.revoked)}" if known.revoked else "valid"
            fields = (str(known.id), known.owner, known.name, f"made {_day(known.created)}", used, state)
            click.echo("\t".join(fields))


@key.command()
@click.argument("number", metavar="ID", type=int)
@data_dir_option
def revoke(number: int, data_dir: Path | None) -> None:
    """Revoke the key with this ID, as `tinkex key list` shows it; tokens given for it end too."""
    with _store(data_dir) as store:
        if not revoke_key(store, number):
            raise click.ClickException(f"there is no valid key {number}; `tinkex key list` shows them")
    click.echo(f"key {number} is revoked", err=True)


@contextlib.contextmanager
def _store(data_dir: Path | None, *, new: bool = False) -> Iterator[Store]:
    directory = (data_dir or default_data_dir()).expanduser()
    if not new and not (directory / DATABASE).exists():
        raise click.ClickException(f"there is no data of a server in {directory}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(Store(directory / DATABASE)) as store:
            yield store
    except (OSError, sqlite3.Error) as error:
        raise click.ClickException(f"{directory}: {error}") from None


def _day(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment).astimezone().isoformat(" ", "minutes")
