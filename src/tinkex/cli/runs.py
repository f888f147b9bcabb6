"""`tinkex run`, `session` and `model`: look at the things that a server has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import click

from tinkex.cli.options import (
    CommandGroup,
    Connection,
    connecting,
    in_one_line,
    option,
    paged,
    refuse_before,
    reporting,
    switch,
    wait,
)
from tinkex.cli.output import (
    Column,
    CommandError,
    Outcome,
    expiry,
    lora,
    print_fields,
    print_table,
    printable,
    run_data,
    size,
    status,
    wants_json,
    when,
    yes_no,
)
from tinkex.cli.progress import fetch_pages, transfer, waiting
from tinkex.cli.sample_command import sample, sample_options

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types.checkpoints import Checkpoint, TrainingRun

PAGE = 100
COLUMNS: dict[str, tuple[Column, Callable[[TrainingRun], object]]] = {
    "id": (Column("ID", heads=True), lambda run: run.training_run_id),
    "model": (Column("Base Model", folds=True), lambda run: run.base_model),
    "owner": (Column("Owner"), lambda run: run.model_owner),
    "lora": (Column("LoRA"), lambda run: lora(run.is_lora, run.lora_rank)),
    "status": (Column("Status"), lambda run: status(run.corrupted, run.loaded)),
    "updated": (Column("Last Update"), lambda run: when(run.last_request_time)),
    "checkpoint": (
        Column("Last Checkpoint"),
        lambda run: run.last_checkpoint and run.last_checkpoint.checkpoint_id,
    ),
    "checkpoint_time": (
        Column("Saved"),
        lambda run: when(run.last_checkpoint.time if run.last_checkpoint else None),
    ),
}
DEFAULT_COLUMNS = "id,model,owner,lora,status,updated"

MODEL_COLUMNS = (
    Column("Model", folds=True),
    Column("Max Context", right=True),
    Column("Trainable"),
    Column("Sampleable"),
)

scope_option = option(
    "--access-scope",
    "List your own runs only, or all you may see.",
    default="owned",
    choices=["owned", "accessible"],
)


def looks_up(group: click.Group, id_name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator for a group's command `info`, which shows the thing of an id."""

    def decorate(show: Callable[..., Any]) -> click.Command:
        command = click.argument(id_name)(scope_option(reporting(show)))
        return group.command("info")(command)

    return decorate


@click.group(cls=CommandGroup, invoke_without_command=True)
@sample_options
@connecting
@click.pass_context
def run(context: click.Context, /, **given: Any) -> Any:
    """Sample from a model; or list training runs (`run list`), or show one (`run info`).

    For example: tinkex run --base-model NAME --prompt "Once upon a time" --max-tokens 64
    """
    if refuse_before(context):
        return None
    if wants_json():
        given["json"] = True
    return sample(**given)


# ── training runs ─────────────────────────────────────────────────────────────────────────────────


@run.command("list")
@paged
@scope_option
@option("-c --columns", f"Columns to show: {', '.join(COLUMNS)}.", default=DEFAULT_COLUMNS)
@reporting
def list_runs(
    limit: int, offset: int, access_scope: Any, columns: str, connection: Connection
) -> Outcome:
    """List training runs, the newest first."""
    chosen = [name.strip() for name in columns.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in COLUMNS]:
        raise CommandError(f"--columns: there is no {unknown[0]!r}; there are {', '.join(COLUMNS)}")
    with connection.rest() as rest:

        def fetch(count: int, start: int) -> tuple[list[TrainingRun], Any]:
            found = wait(rest.list_training_runs(count, start, access_scope))
            return found.training_runs, found.cursor

        runs, total = fetch_pages(fetch, "training runs", PAGE, limit, offset)
    data = {"runs": [run_data(item) for item in runs], "total": total, "shown": len(runs)}

    def show() -> None:
        picked = [COLUMNS[name] for name in chosen]
        rows = [[value(item) or "N/A" for _, value in picked] for item in runs]
        print_table(f"Training runs ({len(runs)}/{total})", [column for column, _ in picked], rows)

    return Outcome(data, runs, show=show)


@looks_up(run, "run_id")
def show_run(run_id: str, access_scope: Any, connection: Connection) -> Outcome:
    """Show a training run."""
    with connection.rest() as rest, in_one_line(ValueError):
        found = wait(rest.get_training_run(run_id, access_scope))
    return Outcome(run_data(found), found, show=lambda: _print_run(found))


def _print_run(found: TrainingRun) -> None:
    click.echo(printable(f"{found.training_run_id} ({found.base_model})"))
    fields: dict[str, object] = {
        "Owner": found.model_owner,
        "LoRA": "Yes" if found.is_lora else "No",
    }
    if found.lora_rank is not None:
        fields["Rank"] = found.lora_rank
    fields |= {
        "Status": status(found.corrupted, found.loaded),
        "Last update": when(found.last_request_time),
    }
    shown = [*fields.items()]
    shown += _checkpoint_fields("Last training checkpoint", found.last_checkpoint)
    shown += _checkpoint_fields("Last sampler checkpoint", found.last_sampler_checkpoint)
    if found.user_metadata:
        shown.append(("Metadata", _metadata_text(found.user_metadata)))
    print_fields(shown)


def _metadata_text(metadata: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in metadata.items())


def _checkpoint_fields(label: str, checkpoint: Checkpoint | None) -> list[tuple[str, object]]:
    if checkpoint is None:
        return []
    return [
        (label, checkpoint.checkpoint_id),
        ("  Time", when(checkpoint.time)),
        ("  Expires", expiry(checkpoint.expires_at)),
        ("  Path", checkpoint.tinker_path),
    ]


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────


@click.group(cls=CommandGroup)
def session() -> None:
    """List, look up and finish sessions."""


@session.command("list")
@paged
@scope_option
@reporting
def list_sessions(limit: int, offset: int, access_scope: Any, connection: Connection) -> Outcome:
    """List the ids of sessions, the newest first."""
    with connection.rest() as rest:

        def fetch(count: int, start: int) -> tuple[list[str], None]:
            return wait(rest.list_sessions(count, start, access_scope)).sessions, None

        found, _ = fetch_pages(fetch, "sessions", PAGE, limit, offset)
    return Outcome(
        {"sessions": found, "shown": len(found)},
        found,
        show=lambda: print_table(
            f"Sessions ({len(found)})", [Column("ID", folds=True)], [[item] for item in found]
        ),
    )


@looks_up(session, "session_id")
def show_session(session_id: str, access_scope: Any, connection: Connection) -> Outcome:
    """Show the training runs and samplers of a session."""
    with connection.rest() as rest, in_one_line(ValueError):
        found = wait(rest.get_session(session_id, access_scope))
    data = {
        "session_id": session_id,
        "display_name": found.display_name,
        "training_run_ids": found.training_run_ids,
        "sampler_ids": found.sampler_ids,
        "user_metadata": found.user_metadata,
    }
    fields: dict[str, object] = {"ID": session_id}
    if found.display_name:
        fields["Name"] = found.display_name
    fields["Training runs"] = ", ".join(found.training_run_ids) or "none"
    fields["Samplers"] = ", ".join(found.sampler_ids) or "none"
    if found.user_metadata:
        fields["Metadata"] = _metadata_text(found.user_metadata)
    return Outcome(data, found, show=lambda: print_fields(fields))


@session.command()
@click.argument("session_id")
@option(
    "--reason",
    "How it ended.",
    default="success",
    choices=["success", "errored", "interrupted"],
)
@option("--detail", "A note about its end.", metavar="TEXT")
@reporting
def finish(session_id: str, reason: Any, detail: str | None, connection: Connection) -> Outcome:
    """Finish a session that a program left open.

    Its runs are unloaded, its checkpoints stay.
    """
    with connection.rest() as rest, in_one_line(ValueError):
        wait(rest.finish_session(session_id, reason, detail))
    data = {
        "command": "session finish",
        "action": "finish",
        "session_id": session_id,
        "reason": reason,
    }
    return Outcome(data, show=f"Finished {session_id}")


@session.command("export-trace")
@click.argument("session_id")
@option(
    "-o --output",
    "Output file.  [default: ./SESSION_ID.pftrace]",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
)
@switch("--url-only", help="Print the address of the trace, and do not fetch it.")
@reporting
def export_trace(
    session_id: str, output: Path | None, url_only: bool, connection: Connection
) -> Outcome:
    """Fetch a session's timeline as a Perfetto trace.

    Not all servers make them.
    """
    if url_only and output is not None:
        raise click.UsageError("--output has no effect with --url-only")
    target = output or Path(f"{session_id.replace('/', '_')}.pftrace")
    with connection.rest() as rest, in_one_line(ValueError, RuntimeError, OSError):
        with waiting("the trace is not ready yet"):
            url = wait(rest.export_session_trace(session_id))
        if url_only:
            return Outcome({"session_id": session_id, "url": url}, show=url)
        _bring(rest, url, target)
        written = target.stat().st_size
    data = {
        "session_id": session_id,
        "destination": str(target),
        "file_size_bytes": written,
    }
    return Outcome(data, show=f"Wrote {target} ({size(written)})")


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


# ── models ────────────────────────────────────────────────────────────────────────────────────────


@click.group(cls=CommandGroup)
def model() -> None:
    """List the models that the server offers."""


@model.command("list")
@click.argument("substring", required=False)
@reporting
def list_models(substring: str | None, connection: Connection) -> Outcome:
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
    rows = [
        (
            item.model_name,
            item.max_context_length or "N/A",
            yes_no(item.trainable),
            yes_no(item.sampleable),
        )
        for item in found
    ]
    title = f"Models ({len(found)}/{len(answer.supported_models)})"
    return Outcome(data, answer, show=lambda: print_table(title, MODEL_COLUMNS, rows))
