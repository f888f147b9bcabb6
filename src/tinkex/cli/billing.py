"""`tinkex billing`: usage and the storage of checkpoints."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tinkex.cli.options import (
    CommandGroup,
    Connection,
    in_one_line,
    option,
    reporting,
    wait,
)
from tinkex.cli.output import (
    Column,
    Outcome,
    counted,
    print_table,
    size,
    write_file,
)

USAGE = (
    "bucket_start",
    "bucket_end",
    "base_model",
    "user_name",
    "session_id",
    "project_id",
    "estimated_cost_usd",
)
STORAGE = (
    "project_id",
    "user_email",
    "user_name",
    "checkpoint_count",
    "size_bytes",
    "estimated_monthly_cost_usd",
)


csv_option = option(
    "--csv csv_path",
    "Write the rows to this file as CSV; - is standard output.",
    metavar="PATH",
)


@click.group(cls=CommandGroup)
def billing() -> None:
    """Show usage and the storage of checkpoints."""


@billing.command()
@click.argument("starting_on")
@click.argument("ending_before")
@csv_option
@option(
    "--sessions-csv",
    "Write the sessions to this file as CSV; - is standard output.",
    metavar="PATH",
)
@reporting
def usage(
    starting_on: str,
    ending_before: str,
    csv_path: str | None,
    sessions_csv: str | None,
    connection: Connection,
) -> Outcome:
    """Show usage hour by hour.

    From STARTING_ON until before ENDING_BEFORE: both are times such as 2026-07-13T00:00:00Z or
    2026-07-13, in UTC unless they name a zone.
    """
    if (csv_path, sessions_csv) == ("-", "-"):
        raise click.UsageError("only one of --csv and --sessions-csv can be standard output")
    with connection.admin() as admin, in_one_line(ValueError):
        answer = wait(admin.get_billing_usage(starting_on, ending_before))
    data = _plain(answer)
    rows = [_flat(event) for event in data["data"]]
    if csv_path is not None:
        _write_csv(csv_path, rows)
    if sessions_csv is not None:
        sessions = [
            {
                "session_id": name,
                "user_metadata": json.dumps(known.get("user_metadata"), ensure_ascii=False),
            }
            for name, known in data["sessions"].items()
        ]
        _write_csv(sessions_csv, sessions, ("session_id", "user_metadata"))

    def show() -> None:
        if "-" not in (csv_path, sessions_csv):
            _print_rows(f"Usage ({counted(len(rows), 'row')})", rows, USAGE)
            if data.get("cost_data_through"):
                click.echo(f"Costs are complete until {data['cost_data_through']}", err=True)

    return Outcome(data, answer, show=show)


@billing.command("checkpoint-storage")
@option("--project-id", "Only this project.", metavar="ID")
@csv_option
@reporting
def checkpoint_storage(
    project_id: str | None, csv_path: str | None, connection: Connection
) -> Outcome:
    """Show checkpoint storage by project and owner."""
    with connection.admin() as admin:
        answer = wait(admin.get_current_checkpoint_storage_usage(project_id))
    data = _plain(answer)
    if csv_path is not None:
        _write_csv(csv_path, data["data"])

    def show() -> None:
        if csv_path != "-":
            rows = [{**item, "size_bytes": size(item["size_bytes"])} for item in data["data"]]
            _print_rows(f"Checkpoint storage ({counted(len(rows), 'row')})", rows, STORAGE)

    return Outcome(data, answer, show=show)


def _plain(answer: Any) -> dict[str, Any]:
    """Return an answer as plain data, with ISO 8601 times."""
    plain: dict[str, Any] = answer.model_dump(mode="json")
    return plain


def _flat(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event with the fields of its subject among its own."""
    flat = {name: value for name, value in event.items() if name != "event_info"}
    return flat | dict(event.get("event_info") or {})


def _fields(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _print_rows(title: str, rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> None:
    """Print rows: the usual fields first, then all others."""
    rest = [name for name in _fields(rows) if name not in first]
    names = [
        name
        for name in (*first, *rest)
        if name in first or any(row.get(name) is not None for row in rows)
    ]
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    print_table(
        title, [Column(name, folds=name.endswith(("_id", "_model"))) for name in names], cells
    )


def _cell(value: object) -> str:
    return "null" if value is None else str(value)


def _write_csv(path: str, rows: Sequence[Mapping[str, Any]], fields: Sequence[str] = ()) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(fields) or _fields(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: "null" if value is None else value for name, value in row.items()} for row in rows
    )
    if path == "-":
        click.echo(text.getvalue(), nl=False)
    else:
        write_file(Path(path), text.getvalue())
