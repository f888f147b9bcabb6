"""`tinkex checkpoint`: what is saved in a data directory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import click

from tinkex.engine import EngineError
from tinkex.local import default_data_dir, require_packages, resolve_models


@click.group()
def checkpoint() -> None:
    """Bring checkpoints in from elsewhere."""


@checkpoint.command("import")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--base-model",
    metavar="NAME[=DIR]",
    help="The model it was trained on, as the server calls it: a bundled name, a hub id, or NAME=DIR.  "
    "[default: the one that the adapter names]",
)
@click.option("--name", default="imported", show_default=True, help="What to call the checkpoint.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The server's data directory; the server may run meanwhile. [default: TINKEX_DATA_DIR]",
)
def import_(directory: Path, base_model: str | None, name: str, data_dir: Path | None) -> None:
    """Make a training checkpoint of a PEFT adapter in DIRECTORY, and print its path.

    A training client that is created from that path computes what PEFT computes with the adapter, and trains on.
    """
    require_packages()
    from tinkex.server.imports import import_adapter, read_source
    from tinkex.server.store import Store

    try:
        named = read_source(directory).base_model or ""
        if base_model is None and (not named or Path(named).is_dir()):
            raise click.UsageError(
                f"the adapter names its base model {named!r}, which is no name that a server has: "
                "give --base-model NAME[=DIR]"
            )
        model, _, place = (base_model or named).partition("=")
        base_directory = resolve_models({model: place})[model]
        root = (data_dir or default_data_dir()).expanduser().resolve()
        root.mkdir(parents=True, exist_ok=True)
        store = Store(root / "tinkex.sqlite3")
        try:
            saved = import_adapter(store, directory, model, base_directory, name)
        finally:
            store.close()
    except (EngineError, OSError, sqlite3.Error) as error:
        raise click.ClickException(str(error)) from None
    click.echo(saved.tinker_path)
