"""`tinkex model`: the server's models."""

from __future__ import annotations

import click

from tinkex.cli.options import CommandGroup, Connection, connecting, formatted, wait
from tinkex.cli.outcomes import Outcome
from tinkex.cli.output import Column, print_json, print_table, yes_no

COLUMNS = (
    Column("Model", folds=True),
    Column("Max Context", right=True),
    Column("Trainable"),
    Column("Sampleable"),
)


@click.group(cls=CommandGroup)
def model() -> None:
    """List the models that the server offers."""


@model.command("list")
@click.argument("substring", required=False)
@formatted
@connecting
def list_command(substring: str | None, as_json: bool, connection: Connection) -> Outcome:
    """List the models, their context lengths and uses.

    With SUBSTRING, only those with it in their names, in any case.
    """
    from tinkex.client.futures.api_future import start
    from tinkex.wire import protocol

    with connection.rest() as rest:
        answer = wait(start(rest.transport.call(protocol.GET_SERVER_CAPABILITIES)))
    wanted = (substring or "").casefold()
    found = [
        item for item in answer.supported_models if wanted in (item.model_name or "").casefold()
    ]
    data = {
        "models": [
            {
                "model_name": item.model_name,
                "max_context_length": item.max_context_length,
                "trainable": item.trainable,
                "sampleable": item.sampleable,
            }
            for item in found
        ]
    }
    if as_json:
        print_json(data)
    else:
        rows = [
            (
                item.model_name,
                item.max_context_length or "N/A",
                yes_no(item.trainable),
                yes_no(item.sampleable),
            )
            for item in found
        ]
        print_table(f"Models ({len(found)}/{len(answer.supported_models)})", COLUMNS, rows)
    return Outcome(data, answer)
