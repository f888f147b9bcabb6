"""`tinkex key`: the keys of a server on this machine.

A running server sees changes at once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.options import CommandGroup, formatted, option
from tinkex.cli.output import (
    Column,
    CommandError,
    Outcome,
    iso,
    print_table,
    reason_of,
    when,
)

if TYPE_CHECKING:
    from tinkex.server.database.interface import Database, Key

COLUMNS = (
    Column("ID", right=True),
    Column("Owner", folds=True),
    Column("Name", folds=True),
    Column("Made"),
    Column("Last Used"),
    Column("Status"),
)

data_dir_option = option(
    "--data-dir",
    "The server's data directory.  [default: TINKEX_DATA_DIR]",
    type=click.Path(path_type=Path),
)


@click.group(cls=CommandGroup)
def key() -> None:
    """Make, list and revoke the keys of a server on this machine.

    With the first key, the server of that data directory refuses requests without one.
    """


@key.command()
@click.argument("name")
@option(
    "--owner",
    "Owner of the key: sessions, runs and checkpoints made with it are seen by keys of the same "
    "owner only.",
    default="local",
)
@data_dir_option
@formatted
def create(name: str, owner: str, data_dir: Path | None) -> Outcome:
    """Make a key called NAME and print it.

    It is shown only once: the server keeps a hash of it.
    """
    from tinkex.server.access.keys import create_key

    if not owner.strip() or not owner.isprintable():
        raise click.UsageError("--owner must be a name")
    with _database(data_dir, new=True) as database:
        number, made = create_key(database, name, owner)
    data = {"id": number, "owner": owner, "name": name, "key": made}
    note = f"key {number} ({name}) of {owner}; it will not be shown again"
    return Outcome(data, show=made, note=note)


@key.command("list")
@data_dir_option
@formatted
def list_command(data_dir: Path | None) -> Outcome:
    """List all keys, also revoked ones."""
    with _database(data_dir) as database:
        known = database.keys.all()
    data = {"keys": [_key_data(item) for item in known]}
    rows = [_row(item) for item in known]
    return Outcome(data, show=lambda: print_table(f"Keys ({len(known)})", COLUMNS, rows))


def _key_data(item: Key) -> dict[str, Any]:
    return {
        "id": item.id,
        "owner": item.owner,
        "name": item.name,
        "created": iso(_moment(item.created)),
        "last_used": iso(_moment(item.last_used)),
        "revoked": iso(_moment(item.revoked)),
    }


def _row(item: Key) -> tuple[object, ...]:
    used, revoked = _moment(item.last_used), _moment(item.revoked)
    return (
        item.id,
        item.owner,
        item.name,
        when(_moment(item.created)),
        "never" if used is None else when(used),
        "valid" if revoked is None else f"revoked {when(revoked)}",
    )


@key.command()
@click.argument("number", metavar="ID", type=int)
@data_dir_option
@formatted
def revoke(number: int, data_dir: Path | None) -> Outcome:
    """Revoke the key with this ID.

    `tinkex key list` shows the IDs. Tokens made with the key end too.
    """
    from tinkex.server.access.keys import revoke_key

    with _database(data_dir) as database:
        if not revoke_key(database, number):
            raise CommandError(f"there is no valid key {number}; `tinkex key list` shows them")
    data = {"command": "key revoke", "action": "revoke", "id": number}
    return Outcome(data, show=f"key {number} is revoked")


@contextlib.contextmanager
def _database(data_dir: Path | None, *, new: bool = False) -> Iterator[Database]:
    from tinkex.local import default_data_dir, unusable
    from tinkex.server.database.interface import DatabaseError
    from tinkex.server.database.sqlite import SqliteDatabase, is_database
    from tinkex.server.files.data_dir import DataDirError, make_directory

    directory = (data_dir or default_data_dir()).expanduser()
    if not new and not is_database(directory):
        raise CommandError(f"there is no data of a server in {directory}")
    try:
        make_directory(directory)
        with contextlib.closing(SqliteDatabase(directory)) as database:
            yield database
    except DataDirError as error:
        raise CommandError(str(unusable(directory, error)), error) from None
    except (OSError, DatabaseError) as error:
        told = reason_of(error) if isinstance(error, OSError) else f"{directory}: {error}"
        raise CommandError(told, error) from None


def _moment(seconds: float | None) -> dt.datetime | None:
    return dt.datetime.fromtimestamp(seconds, dt.UTC) if seconds else None
