"""`tinkex cluster`: the workers of a server."""

from __future__ import annotations

import datetime as dt
from typing import Any

import click

from tinkex.cli.options import CommandGroup, Connection, connecting, formatted, in_one_line, wait
from tinkex.cli.output import Column, Outcome, print_table, when

COLUMNS = (
    Column("Worker", folds=True),
    Column("Role"),
    Column("State"),
    Column("Runs", right=True),
    Column("Samples", right=True),
    Column("Weights", right=True),
    Column("Starts", right=True),
    Column("Since"),
    Column("Place", folds=True),
    Column("Reason", folds=True),
)


@click.group(cls=CommandGroup)
def cluster() -> None:
    """List and drain the workers of a server."""


@cluster.command()
@formatted
@connecting
def status(connection: Connection) -> Outcome:
    """List the workers, and what is at home on each."""
    with connection.http() as http, in_one_line(ValueError):
        data: dict[str, Any] = wait(http.get("cluster"))
    rows = [
        [
            one["name"],
            one["role"],
            one["state"],
            str(one["runs"]),
            str(one["samples"]),
            str(one["weights"]),
            str(one.get("starts", "")),
            when(dt.datetime.fromtimestamp(one["since"], dt.UTC)) if "since" in one else "",
            one.get("place") or "",
            one["reason"] or "",
        ]
        for one in data["workers"]
    ]
    return Outcome(data, data, show=lambda: print_table(f"Workers ({len(rows)})", COLUMNS, rows))


@cluster.command()
@click.argument("node")
@formatted
@connecting
def drain(node: str, connection: Connection) -> Outcome:
    """Move the work of a worker or a machine to others, and end it.

    NODE is the name of a worker or of a machine, as `tinkex cluster status` shows them.
    """
    with connection.http() as http, in_one_line(ValueError):
        data: dict[str, Any] = wait(http.post("cluster/drain", {"node": node}))
    return Outcome(data, data, show=lambda: click.echo(f"drained: {', '.join(data['drained'])}"))
